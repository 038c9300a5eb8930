// The table of requests that wait and run.

import { byId, element } from "./dom.js";
import { count, counted, duration } from "./format.js";
import { bar } from "./usage_bar.js";

/** Show the live requests of `/v1/activity`. */
export function showRequests(live) {
  const { running, waiting, requests } = live;
  const left = running + waiting - requests.length;
  byId("requests-count").textContent =
    running + waiting
      ? `${count(running)} answering, ${count(waiting)} before the first token`
      : "none now";
  const place = byId("requests");
  if (!requests.length) {
    place.replaceChildren();
    return;
  }
  const hasTenants = requests.some((request) => request.tenant);
  const hasReplicas = requests.some((request) => request.replica !== undefined);
  const head = ["Request", hasTenants && "Tenant", hasReplicas && "Engine", "State", "Prompt"];
  const numbers = ["tokens", "output", "age"];
  const rows = requests.map((request) => row(request, hasTenants, hasReplicas));
  const table = element(
    "table",
    {},
    element(
      "thead",
      {},
      element(
        "tr",
        {},
        head.filter(Boolean).map((name) => element("th", { scope: "col" }, name)),
        numbers.map((name) => element("th", { scope: "col", class: "number" }, name)),
      ),
    ),
    element("tbody", {}, rows),
  );
  const more =
    left > 0 ? element("p", { class: "hint" }, `and ${counted(left, "more request")}`) : "";
  place.replaceChildren(table, more);
}

function row(request, hasTenants, hasReplicas) {
  const parts = [
    ["read", request.read ?? 0],
    ["shared", request.shared ?? 0],
    ["computed", request.computed ?? 0],
  ];
  const cells = [element("td", {}, element("code", {}, request.id?.slice(-10) ?? "–"))];
  if (hasTenants) cells.push(element("td", {}, request.tenant || "–"));
  if (hasReplicas) cells.push(element("td", {}, String(request.replica ?? "–")));
  const output = count(request.output_tokens ?? 0);
  cells.push(
    element("td", {}, request.state === "running" ? "answers" : "first token"),
    element("td", {}, request.state === "running" ? bar(parts) : "–"),
    element("td", { class: "number" }, count(request.prompt_tokens)),
    element(
      "td",
      { class: "number" },
      request.max_tokens ? `${output} of ${count(request.max_tokens)}` : output,
    ),
    element("td", { class: "number" }, duration(request.age_s)),
  );
  return element("tr", {}, cells);
}
