// Why the cached part of a prompt ends where it does, in a sentence.

const SENTENCES = {
  cold: "From here on the prompt is new: nothing that is cached goes on like this.",
  new_turn: "The conversation goes on: everything before its last answer was cached.",
  diverged: "A cached prompt is the same up to here, and goes on differently.",
  evicted: "The next page was cached, and has been evicted.",
  in_flight: "Another request is computing the next page now.",
  other_namespace: "It is cached under another salt of yours.",
  page_tail: "What is left fills no whole page; only whole pages are cached.",
  shorter_than_a_page: "The whole prompt is shorter than a page, so it is never cached.",
  disabled: "The server runs without a prefix cache.",
};

/** What ended a lookup: a sentence, the place, and the two texts where they differ. */
export function missParts(miss) {
  if (!miss) return { sentence: "All of it that can be cached was cached.", place: "" };
  const parts = {
    sentence: SENTENCES[miss.reason] ?? `Reason: ${miss.reason}.`,
    place: miss.segment ? `${miss.segment}, token ${miss.at_token}` : `token ${miss.at_token}`,
  };
  if (miss.had && miss.got) Object.assign(parts, { had: miss.had, got: miss.got });
  if (miss.warning) parts.warning = miss.warning;
  if (miss.tier) parts.tier = `The tier ${miss.tier} had the next page (${miss.tier_reason}).`;
  return parts;
}
