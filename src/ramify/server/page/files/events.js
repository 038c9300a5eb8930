// Server-sent events of a response.

/** Yield the JSON of each event's data, until `[DONE]` or the end. */
export async function* jsonEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (pending + value).split("\n\n");
      pending = events.pop();
      for (const event of events) {
        for (const line of event.split("\n")) {
          if (!line.startsWith("data: ")) continue;
          const data = line.slice("data: ".length);
          if (data === "[DONE]") return;
          yield JSON.parse(data);
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
