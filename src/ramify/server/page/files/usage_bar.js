// A bar of prompt tokens: read from each tier, shared with a request in flight, computed.

import { element } from "./dom.js";
import { count } from "./format.js";
import { missParts } from "./reasons.js";

const NAMES = {
  read: "read from the cache",
  pool: "read from the pool",
  host: "read from host memory",
  disk: "read from disk",
  remote: "read from the shared store",
  shared: "shared in flight",
  computed: "computed",
};

/** The parts of a prompt, as [kind, tokens]; kinds are classes of the style sheet. */
export function usageParts(usage) {
  const tiers = usage.read_by_tier ? Object.entries(usage.read_by_tier) : [["read", usage.read]];
  return [...tiers, ["shared", usage.shared_in_flight], ["computed", usage.computed]];
}

/** A bar without a legend; its label has the numbers. */
export function bar(parts) {
  const shown = parts.filter(([, tokens]) => tokens > 0);
  const label = shown.map(([kind, tokens]) => `${count(tokens)} ${NAMES[kind] ?? kind}`);
  const node = element("div", { class: "bar", role: "img", "aria-label": label.join(", ") });
  for (const [kind, tokens] of shown) {
    const piece = element("i", { class: kind });
    piece.style.flex = `${tokens} 1 0`;
    node.append(piece);
  }
  return node;
}

/** What the colours of a bar mean, with the numbers. */
export function barKey(parts) {
  const entries = parts
    .filter(([, tokens]) => tokens > 0)
    .map(([kind, tokens]) =>
      element("span", {}, element("i", { class: kind }), `${count(tokens)} ${NAMES[kind] ?? kind}`),
    );
  return element("p", { class: "key" }, entries);
}

/** Why the cached part ends: sentence, place, and the texts that differ. */
export function missText(miss) {
  const { sentence, place, had, got, warning, tier } = missParts(miss);
  const node = element("p", { class: "why" }, sentence);
  if (place) node.append(" At ", element("code", {}, place), ".");
  if (had) {
    node.append(
      " Cached: ",
      element("code", {}, JSON.stringify(had)),
      ", sent: ",
      element("code", {}, JSON.stringify(got)),
      ".",
    );
  }
  for (const more of [tier, warning]) if (more) node.append(` ${more}`);
  return node;
}
