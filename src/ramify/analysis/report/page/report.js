"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const count = (n) => {
    if (Math.abs(n) < 1e5) return Math.round(n).toLocaleString("en-US");
    const [size, unit] = Math.abs(n) >= 1e9 ? [1e9, "G"] : Math.abs(n) >= 1e6 ? [1e6, "M"] : [1e3, "K"];
    return Number((n / size).toPrecision(3)) + " " + unit;
  };
  const percent = (x) => (100 * x).toFixed(1) + " %";
  const money = (x) => (x < 0 ? "-$" : "$") + (Math.abs(x) >= 0.01 || x === 0 ? Math.abs(x).toFixed(2) : Math.abs(x).toPrecision(2));

  // Theme: the system's until switched.
  const root = document.documentElement;
  const isDark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  $("theme").addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; drawTree(); });

  // Copy as Markdown; a page opened from a file may have no clipboard API.
  const copy = async (text, button) => {
    const label = button.textContent;
    let done = false;
    try { await navigator.clipboard.writeText(text); done = true; } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      done = document.execCommand("copy");
      area.remove();
    }
    button.textContent = done ? "Copied" : "Not allowed";
    setTimeout(() => { button.textContent = label; }, 1500);
  };
  $("copy-all").addEventListener("click", (event) => copy(data.markdown, event.currentTarget));
  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", () => copy(data.findings[Number(button.dataset.finding)], button));
  }

  // A link to a finding opens it; printing opens everything.
  const openTarget = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && target.tagName === "DETAILS") { target.open = true; target.scrollIntoView(); }
  };
  addEventListener("hashchange", openTarget);
  openTarget();
  addEventListener("beforeprint", () => { for (const each of document.querySelectorAll("details")) each.open = true; });

  // What if: each set was replayed beforehand.
  const boxes = [...document.querySelectorAll("#what-if input")];
  const showSaving = () => {
    const mask = boxes.reduce((sum, box) => sum | (box.checked ? 1 << Number(box.dataset.bit) : 0), 0);
    const saving = data.whatIf.savings[mask];
    if (!mask) { $("what-if-result").textContent = "Tick a change."; return; }
    if (!saving) { $("what-if-result").textContent = "This set was not replayed: the time for replays was over. Choose fewer changes, or all."; return; }
    const [tokens, low, high, dollars] = saving;
    let text = count(tokens) + " tokens saved";
    if (data.input) text += ", " + percent(tokens / data.input) + " of the input";
    text += "\nrange " + count(low) + " to " + count(high);
    if (dollars !== null) text += "\n" + money(dollars) + (dollars < 0 ? " more is paid: its writes cost more than its reads save" : " saved");
    $("what-if-result").textContent = text;
  };
  for (const box of boxes) box.addEventListener("change", showSaving);

  // The icicle.
  const PARENT = 0, LABEL = 1, TEXT = 2, FIRST = 3, REQUESTS = 4, TOKENS = 5, PREFIX = 6, TOTAL = 7, OWN = 8, READ = 9, CAUSE = 10, LOST = 11, MERGED = 12;
  const nodes = data.nodes, ROW = 26, SVG = "http://www.w3.org/2000/svg";
  const children = nodes.map(() => []);
  nodes.forEach((node, at) => { if (node[PARENT] >= 0) children[node[PARENT]].push(at); });
  let top = 0, current = 0, found = null, drawn = [];
  const CAUSE_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a5a9e", "#7a6500"];
  const totals = new Map();
  for (const node of nodes) if (node[CAUSE]) totals.set(node[CAUSE], (totals.get(node[CAUSE]) || 0) + node[LOST]);
  const causes = [...totals.keys()].sort((a, b) => totals.get(b) - totals.get(a));
  const causeColour = (name) => CAUSE_COLOURS[causes.indexOf(name) % CAUSE_COLOURS.length];
  const mix = (a, b, part) => "rgb(" + a.map((each, at) => Math.round(each + (b[at] - each) * part)).join(",") + ")";
  const colour = (at) => {
    const node = nodes[at], dark = isDark(), empty = dark ? [58, 65, 75] : [222, 227, 233];
    if (!at) return [mix(empty, empty, 0), dark ? "#e9ecef" : "#16191d"];
    if ($("tree-colour").value === "cause") return node[CAUSE] ? [causeColour(node[CAUSE]), "#fff"] : [mix(empty, empty, 0), dark ? "#e9ecef" : "#16191d"];
    const share = node[OWN] ? Math.min(1, node[READ] / node[OWN]) : 0;
    return [mix(empty, dark ? [42, 128, 180] : [0, 100, 160], share), share > 0.45 || dark ? "#fff" : "#16191d"];
  };
  const sorted = (at) => {
    const byTime = $("tree-order").value === "time";
    return [...children[at]].sort((a, b) => byTime ? nodes[a][FIRST] - nodes[b][FIRST] : nodes[b][TOTAL] - nodes[a][TOTAL]);
  };
  const make = (name, attributes, parent) => {
    const element = document.createElementNS(SVG, name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    parent.append(element);
    return element;
  };
  function drawTree() {
    const box = $("icicle");
    if (!box || !nodes.length) return;
    const width = box.clientWidth || 900, placed = [];
    // The zoomed node's ancestors lie above it, as wide as everything.
    const above = [];
    for (let at = nodes[top][PARENT]; at >= 0; at = nodes[at][PARENT]) above.unshift(at);
    above.forEach((at, depth) => placed.push([at, 0, width, depth]));
    const stack = [[top, 0, width, above.length]];
    let depths = above.length + 1;
    while (stack.length) {
      const [at, x, size, depth] = stack.pop();
      placed.push([at, x, size, depth]);
      depths = Math.max(depths, depth + 1);
      let left = x;
      for (const child of sorted(at)) {
        const part = nodes[at][TOTAL] ? size * nodes[child][TOTAL] / nodes[at][TOTAL] : 0;
        if (part >= 0.7) stack.push([child, left, part, depth + 1]);
        left += part;
      }
    }
    box.replaceChildren();
    const svg = make("svg", {viewBox: "0 0 " + width + " " + depths * ROW, height: depths * ROW}, box);
    drawn = placed;
    for (const [at, x, size, depth] of placed) {
      const [fill, ink] = colour(at);
      const group = make("g", {"data-at": at, class: (at === current ? "at" : "") + (found && !found.has(at) ? " dim" : "")}, svg);
      make("rect", {x, y: depth * ROW, width: Math.max(size, 0.5), height: ROW - 1, fill}, group);
      const fits = Math.floor((size - 8) / 6.6);
      if (fits >= 4) {
        const full = nodes[at][LABEL] + (nodes[at][TEXT] ? "  " + nodes[at][TEXT] : "");
        make("text", {x: x + 5, y: depth * ROW + 17, fill: ink}, group).textContent = full.length > fits ? full.slice(0, fits - 1) + "…" : full;
      }
    }
    legend();
  }
  function legend() {
    const box = $("tree-legend");
    box.replaceChildren();
    const entry = (fill, text) => {
      const item = document.createElement("span"), key = document.createElement("span");
      key.className = "key"; key.style.background = fill;
      item.append(key, text); box.append(item);
    };
    if ($("tree-colour").value === "cause") {
      for (const name of causes) entry(causeColour(name), name + " (" + count(totals.get(name)) + ")");
      if (!causes.length) box.append("no cause of a loss in this log");
    } else {
      const dark = isDark(), empty = dark ? [58, 65, 75] : [222, 227, 233], full = dark ? [42, 128, 180] : [0, 100, 160];
      for (const share of [0, 0.5, 1]) entry(mix(empty, full, share), percent(share) + " read");
    }
  }
  function about(at) {
    const node = nodes[at], lines = [];
    lines.push(node[LABEL] + (node[MERGED] ? "" : ": " + count(node[TOKENS]) + " tokens, prefix of " + count(node[PREFIX])));
    lines.push(count(node[REQUESTS]) + " requests, " + count(node[TOTAL]) + " tokens from here on (" + percent(node[TOTAL] / nodes[0][TOTAL]) + ")" + (node[OWN] ? ", " + percent(node[READ] / node[OWN]) + " of this part read" : "") + (node[LOST] ? ", " + count(node[LOST]) + " lost" + (node[CAUSE] ? " to " + node[CAUSE] : "") : ""));
    if (node[TEXT]) lines.push(node[TEXT]);
    $("tree-about").textContent = lines.join("\n");
  }
  const select = (at, zoom) => { current = at; if (zoom) top = at; about(at); drawTree(); };
  const zoomOut = () => select(Math.max(0, nodes[top][PARENT]), true);
  if (nodes.length) {
    const box = $("icicle");
    const nodeOf = (event) => { const group = event.target.closest && event.target.closest("g"); return group ? Number(group.dataset.at) : -1; };
    box.addEventListener("click", (event) => { const at = nodeOf(event); if (at >= 0) select(at, true); });
    box.addEventListener("mousemove", (event) => { const at = nodeOf(event); if (at >= 0) about(at); });
    $("tree-out").addEventListener("click", zoomOut);
    box.addEventListener("keydown", (event) => {
      const siblings = current && current !== top ? sorted(nodes[current][PARENT]).filter((at) => drawn.some((each) => each[0] === at)) : [current];
      const place = siblings.indexOf(current), key = event.key;
      if (key === "ArrowDown") { const next = sorted(current)[0]; if (next !== undefined) select(next, false); }
      else if (key === "ArrowUp") { if (nodes[current][PARENT] >= 0) select(nodes[current][PARENT], current === top); }
      else if (key === "ArrowRight" && place + 1 < siblings.length) select(siblings[place + 1], false);
      else if (key === "ArrowLeft" && place > 0) select(siblings[place - 1], false);
      else if (key === "Enter") select(current, true);
      else if (key === "Escape") zoomOut();
      else return;
      event.preventDefault();
    });
    $("tree-search").addEventListener("input", (event) => {
      const words = event.currentTarget.value.trim().toLowerCase();
      found = words ? new Set() : null;
      let requests = 0, tokens = 0;
      if (words) nodes.forEach((node, at) => {
        if (!(node[LABEL] + " " + node[TEXT] + " " + node[CAUSE]).toLowerCase().includes(words)) return;
        found.add(at); tokens += node[OWN]; requests = Math.max(requests, node[REQUESTS]);
      });
      $("tree-found").textContent = words ? found.size + " parts, " + percent(tokens / nodes[0][TOTAL]) + " of the tokens" : "";
      drawTree();
    });
    for (const id of ["tree-colour", "tree-order"]) $(id).addEventListener("change", drawTree);
    addEventListener("resize", drawTree);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawTree);
    drawTree();
  }
})();
