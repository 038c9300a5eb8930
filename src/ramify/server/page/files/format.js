// Numbers, times and texts as people read them.

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export function count(value) {
  return WHOLE.format(value);
}

/** "1 token", "2 tokens". */
export function counted(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

export function percent(share) {
  return share === null || Number.isNaN(share) ? "–" : `${Math.round(share * 100)} %`;
}

/** Seconds with a unit that fits. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

/** A text in one line of at most `length` characters; line breaks are shown. */
export function oneLine(text, length) {
  const line = text.replace(/\r?\n/g, "↵").replace(/\s/g, " ");
  const chars = [...line];
  return chars.length <= length ? line : chars.slice(0, Math.max(0, length - 1)).join("") + "…";
}
