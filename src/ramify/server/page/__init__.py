"""The live page: what the cache did and holds, a chat, and a box that explains a request.

    assets      the files of the page, with their types and ETags
    endpoints   GET /, GET /ui and GET /ui/{name}
    files/      HTML, CSS and JavaScript modules, served as they are

The page knows only public endpoints, and shows what the caller's key lets these endpoints show.
"""
