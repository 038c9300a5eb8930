// The box that says what a request would hit, without running it.

import { getJson } from "./api.js";
import { byId, element } from "./dom.js";
import { count, counted, percent } from "./format.js";
import { bar, missText } from "./usage_bar.js";

/** Explain the request of the box when its form is sent. */
export function watchExplainForm() {
  byId("explain-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = byId("explain-input").value;
    if (!text.trim()) return;
    const place = byId("explain-result");
    try {
      place.replaceChildren(...resultOf(await getJson("v1/cache/explain", { body: bodyOf(text) })));
    } catch (error) {
      place.replaceChildren(element("p", { class: "failure" }, error.message));
    }
  });
}

/** A pasted request as it is; anything else is the message of a user. */
function bodyOf(text) {
  if (text.trimStart().startsWith("{")) return text;
  return { messages: [{ role: "user", content: text }] };
}

function resultOf(report) {
  const { prompt_tokens: total, cached_tokens: cached, miss, replicas } = report;
  const parts = [
    ["read", cached],
    ["computed", total - cached],
  ];
  const nodes = [
    element(
      "p",
      {},
      element("strong", {}, percent(cached / total)),
      ` would hit: ${count(cached)} of ${counted(total, "token")}`,
    ),
    bar(parts),
    missText(miss),
    segmentTable(report),
  ];
  if (replicas) {
    const each = replicas.map(
      ({ replica, cached_tokens: tokens }) => `engine ${replica}: ${count(tokens)}`,
    );
    nodes.push(element("p", { class: "hint" }, `Cached tokens by ${each.join(", ")}`));
  }
  return nodes;
}

/** The fields of the request, in the order of the prompt, and how much of each is cached. */
function segmentTable({ segments, cached_tokens: cached, miss }) {
  const rows = segments.map(({ path, start, end }) => {
    const hit = Math.max(0, Math.min(cached, end) - start);
    const isHere = miss && miss.at_token >= start && miss.at_token < end;
    return element(
      "tr",
      { class: isHere ? "miss-here" : null },
      element("td", {}, element("code", {}, path)),
      element("td", { class: "number" }, count(end - start)),
      element("td", { class: "number" }, count(hit)),
    );
  });
  const head = [
    element("th", { scope: "col" }, "Field"),
    element("th", { scope: "col", class: "number" }, "tokens"),
    element("th", { scope: "col", class: "number" }, "cached"),
  ];
  return element(
    "table",
    {},
    element("thead", {}, element("tr", {}, head)),
    element("tbody", {}, rows),
  );
}
