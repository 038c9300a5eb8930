"""The analyser: what requests in a log share, why hits are lost, and what a change would save.

`formats` turn the rows of a log into `records`; `corpus` stores each text once. `sharing` has the tree
of prefixes, `causes` say why a request could not read what an earlier one wrote, `providers` have the
cache rules of vendors and engines, `savings` replays a mended log, `simulate` a cache of finite
capacity, `report` draws all of it. No torch.
"""
