// What the cache did, in one sentence, one bar and a few figures.

import { byId, element } from "./dom.js";
import { count, duration, percent } from "./format.js";
import { totals } from "./series.js";
import { bar, barKey } from "./usage_bar.js";

/** Show the history of `/v1/activity`, and, for the operator, the answer of `/v1/cache`. */
export function showSummary(history, cache) {
  const sum = totals(history);
  const total = sum.read + sum.shared + sum.computed;
  const parts = [
    ["read", sum.read],
    ["shared", sum.shared],
    ["computed", sum.computed],
  ];
  const headline = byId("headline");
  if (total) {
    const saved = element("strong", {}, percent((total - sum.computed) / total));
    headline.replaceChildren(saved, ` of ${count(total)} prompt tokens were not computed`);
    byId("headline-bar").replaceChildren(bar(parts), barKey(parts));
  } else {
    headline.replaceChildren("No request in the last ten minutes");
    byId("headline-bar").replaceChildren();
  }
  const figures = [
    ["Requests", count(sum.requests)],
    ["Time to first token", sum.requests ? duration(sum.ttft / sum.requests) : "–"],
    ["Output tokens", count(sum.output)],
    ...(cache ? cacheFigures(cache) : []),
  ];
  byId("figures").replaceChildren(
    ...figures.map(([name, value]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, value)),
    ),
  );
  showEngines(cache?.replicas);
}

function cacheFigures(cache) {
  const used = cache.num_pages - cache.free_pages;
  const figures = [];
  if (cache.lookup_tokens) {
    figures.push(["Hit rate since the start", percent(cache.hit_rate)]);
    figures.push(["Without evictions", percent(cache.ideal_hit_rate)]);
  }
  figures.push(
    [
      "Pool",
      `${percent(used / cache.num_pages)} of ${count(cache.num_pages * cache.page_size)} tokens`,
    ],
    ["Evicted", `${count(cache.evicted_pages)} pages`],
  );
  return figures;
}

function showEngines(replicas) {
  const list = byId("engines");
  list.hidden = !replicas;
  const items = (replicas ?? []).map((replica) => {
    const facts = [replica.state, `queue ${duration(replica.queue_s)}`];
    if (replica.recent_hit_rate !== undefined)
      facts.push(`hit rate ${percent(replica.recent_hit_rate)}`);
    if (replica.error) facts.push(replica.error);
    return element("li", {}, element("b", {}, `engine ${replica.replica}`), ` ${facts.join(", ")}`);
  });
  list.replaceChildren(...items);
}
