// A chat: each answer with a bar of its prompt's tokens, and why the cached part ended.

import { request } from "./api.js";
import { byId, element } from "./dom.js";
import { count, duration } from "./format.js";
import { jsonEvents } from "./events.js";
import { bar, barKey, missText, usageParts } from "./usage_bar.js";

const MAX_TOKENS = 512;
const CUT = `The answer ends here: at ${MAX_TOKENS} tokens, or where the context is full.`;

export class Chat {
  /** `onAnswer` is called when an answer has ended. */
  constructor(onAnswer) {
    this.onAnswer = onAnswer;
    this.messages = [];
    this.running = null; // AbortController of the answer that is read
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.send();
    });
    byId("chat-input").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.send();
    });
    byId("chat-new").addEventListener("click", () => this.restart());
  }

  restart() {
    this.running?.abort();
    this.messages = [];
    byId("chat-log").replaceChildren();
    byId("chat-input").focus();
  }

  async send() {
    const input = byId("chat-input");
    const text = input.value.trim();
    if (!text) return;
    input.value = "";
    const conversation = [...this.messages, { role: "user", content: text }];
    this.turn("You", text);
    const words = element("div", { class: "words" });
    const turn = this.turn("Model", words);
    const running = (this.running = new AbortController());
    byId("chat-send").textContent = "Stop";
    try {
      const answer = await this.read(conversation, words, turn, running.signal);
      if (this.running === running) {
        this.messages = [...conversation, { role: "assistant", content: answer }];
      }
    } catch (error) {
      const stopped = error.name === "AbortError";
      turn.append(element("p", { class: "failure" }, stopped ? "Stopped." : error.message));
      if (!stopped) input.value = text;
    } finally {
      if (this.running === running) {
        this.running = null;
        byId("chat-send").textContent = "Send";
      }
      this.onAnswer();
    }
  }

  async read(conversation, words, turn, signal) {
    const system = byId("chat-system").value.trim();
    const messages = system ? [{ role: "system", content: system }, ...conversation] : conversation;
    const begin = performance.now();
    let first = null;
    let answer = "";
    const thoughts = element("div", { class: "words hint" });
    const response = await request("v1/chat/completions", {
      body: {
        messages,
        max_tokens: MAX_TOKENS,
        temperature: 0,
        stream: true,
        stream_options: { include_usage: true },
      },
      signal,
    });
    for await (const event of jsonEvents(response)) {
      if (event.error) throw new Error(event.error.message);
      const { delta, finish_reason: reason } = event.choices?.[0] ?? {};
      const [thought, text] = [delta?.reasoning_content, delta?.content];
      if (thought || text) first ??= (performance.now() - begin) / 1000;
      if (thought) {
        if (!thoughts.parentNode) words.before(thoughts);
        thoughts.append(thought);
        this.scroll();
      }
      if (text) {
        answer += text;
        words.textContent = answer;
        this.scroll();
      }
      if (reason === "length") turn.append(element("p", { class: "hint" }, CUT));
      if (event.usage) this.explain(turn, event.usage, first);
    }
    return answer;
  }

  explain(turn, usage, first) {
    const cache = usage.ramify_cache;
    if (!cache) return;
    const parts = usageParts(cache);
    const key = barKey(parts);
    const times = first === null ? "" : `, first after ${duration(first)}`;
    key.append(element("span", {}, `${count(usage.completion_tokens)} generated${times}`));
    turn.append(bar(parts), key, missText(cache.miss));
    this.scroll();
  }

  turn(who, content) {
    const body = content instanceof Node ? content : element("div", { class: "words" }, content);
    const node = element("div", { class: "turn" }, element("b", {}, who), body);
    byId("chat-log").append(node);
    this.scroll();
    return node;
  }

  scroll() {
    byId("chat-log").scrollTop = byId("chat-log").scrollHeight;
  }
}
