"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const root = document.documentElement;

  // Theme: as the system, or as chosen. `?theme=dark` chooses in the address.
  const themes = ["auto", "light", "dark"];
  const themeButton = byId("theme");
  function setTheme(name) {
    root.dataset.theme = name;
    themeButton.textContent = "Theme: " + name;
    themeButton.setAttribute("aria-label", "Theme: " + (name === "auto" ? "as the system" : name));
  }
  const wished = new URLSearchParams(location.search).get("theme");
  setTheme(themes.includes(wished) ? wished : "auto");
  themeButton.addEventListener("click", () => {
    setTheme(themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length]);
  });

  // Copying.
  const status = byId("status");
  let timer = 0;
  function say(text) {
    status.textContent = text;
    status.classList.add("on");
    clearTimeout(timer);
    timer = setTimeout(() => status.classList.remove("on"), 1800);
  }
  function copyByField(text) {
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    say(done ? "Copied" : "The browser does not allow copying");
  }
  function copy(text) {
    if (!navigator.clipboard) {
      copyByField(text);
      return;
    }
    navigator.clipboard.writeText(text).then(() => say("Copied"), () => copyByField(text));
  }
  byId("copy-all").addEventListener("click", () => copy(data.markdown));
  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", () => {
      const link = location.href.split("#")[0] + "#" + button.closest("article").id;
      copy(data.findings[Number(button.dataset.finding)] + "\n\n" + link + "\n");
    });
  }

  // Numbers, as `wording.py` writes them.
  function count(value) {
    if (Math.abs(value) < 1e5) return Math.round(value).toLocaleString("en-US");
    for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["K", 1e3]]) {
      if (Math.abs(value) >= size) return Number((value / size).toPrecision(3)) + " " + unit;
    }
    return String(value);
  }
  const percent = (share) => (100 * share).toFixed(1) + " %";

  // The difference that hover or focus shows hides on Escape.
  for (const row of document.querySelectorAll(".request")) {
    row.addEventListener("keydown", (event) => { if (event.key === "Escape") row.blur(); });
  }

  // Sharing tree. A row of data.nodes is [parent, label, text, first, requests, tokens, prefix,
  // total, own, read, cause, lost, merged].
  const chart = byId("tree-chart");
  if (!chart || !data.nodes.length) return;
  const nodes = data.nodes.map((row, id) => ({
    id, parent: row[0], label: row[1], text: row[2], first: row[3], requests: row[4], tokens: row[5],
    prefix: row[6], total: row[7], own: row[8], read: row[9], cause: row[10], lost: row[11],
    merged: row[12],
    children: [], depth: 0, x: 0, width: 0, group: null,
  }));
  const top = nodes[0];
  for (const node of nodes) {
    if (node.parent < 0) continue;
    nodes[node.parent].children.push(node);
    node.depth = nodes[node.parent].depth + 1;
  }
  const losses = new Map();
  for (const node of nodes) if (node.cause) losses.set(node.cause, (losses.get(node.cause) || 0) + node.lost);
  const ranks = new Map([...losses].sort((a, b) => b[1] - a[1]).map(([cause], rank) => [cause, rank]));
  const svgName = "http://www.w3.org/2000/svg";
  const rowHeight = 24;
  const state = { focus: top, colour: "share", order: "tokens", words: "" };
  const shareOf = (node) => (node.own ? node.read / node.own : 0);
  const stepOf = (node) => Math.min(4, Math.floor(shareOf(node) * 5));

  function make(name, attributes, parent) {
    const element = document.createElementNS(svgName, name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    if (parent) parent.append(element);
    return element;
  }
  function describe(node) {
    const parts = [node.label || "all requests"];
      parts.push(node.requests.toLocaleString("en-US") + (node.requests === 1 ? " request" : " requests"));
    if (node.tokens) parts.push(count(node.tokens) + " tokens each, prefix of " + count(node.prefix));
    parts.push(count(node.total) + " tokens from here on");
    if (node.own) parts.push(percent(shareOf(node)) + " read");
    if (node.cause) parts.push(count(node.lost) + " lost, most by " + node.cause);
    return parts.join(" · ");
  }
  function inform(node) {
    byId("tree-info").textContent = describe(node) + (node.text ? " — “" + node.text + "”" : "");
  }
  const matches = (node) => state.words !== ""
    && (node.label + " " + node.text + " " + node.cause).toLowerCase().includes(state.words);

  function place(width) {
    for (const node of nodes) node.width = 0;
    const trail = [];
    for (let node = state.focus; node; node = nodes[node.parent]) trail.push(node);
    for (const node of trail) { node.x = 0; node.width = width; }
    const stack = [state.focus];
    while (stack.length) {
      const node = stack.pop();
      const sorted = [...node.children].sort(state.order === "time"
        ? (a, b) => a.first - b.first
        : (a, b) => (a.merged > 0) - (b.merged > 0) || b.total - a.total || a.first - b.first);
      node.sorted = sorted;
      let x = node.x;
      for (const child of sorted) {
        child.x = x;
        child.width = node.total ? node.width * child.total / node.total : 0;
        x += child.width;
        if (child.width >= 1) stack.push(child);
      }
    }
  }

  function draw(hasFocus) {
    const width = Math.max(280, chart.clientWidth);
    place(width);
    const shown = nodes.filter((node) => node.width >= 1);
    const depth = Math.max(...shown.map((node) => node.depth)) + 1;
    const svg = make("svg", { viewBox: `0 0 ${width} ${depth * rowHeight}`, height: depth * rowHeight });
    const defs = make("defs", {}, svg);
    const pattern = make("pattern", { id: "hatching", width: 6, height: 6, patternUnits: "userSpaceOnUse",
      patternTransform: "rotate(45)" }, defs);
    make("line", { class: "hatch", x1: 0, y1: 0, x2: 0, y2: 6 }, pattern);
    let found = 0;
    for (const node of shown) {
      const isFound = matches(node);
      if (isFound) found += 1;
      const group = make("g", {
        class: "node" + (isFound ? " found" : state.words ? " dim" : ""),
        role: "treeitem", "aria-level": node.depth + 1, "aria-label": describe(node),
        tabindex: node === state.focus ? 0 : -1,
      }, svg);
      node.group = group;
      group.node = node;
      const box = { x: node.x, y: node.depth * rowHeight, width: node.width, height: rowHeight };
      const rank = ranks.get(node.cause);
      let fill = "cause-none";
      if (state.colour === "share") fill = node.own ? "share-" + stepOf(node) : "cause-none";
      else if (rank !== undefined) fill = "cause-" + (rank % 7);
      make("rect", { class: "box " + fill, ...box }, group);
      const isHatched = state.colour === "share" ? node.own > 0 && shareOf(node) === 0 : rank % 2 === 1;
      if (isHatched) make("rect", { fill: "url(#hatching)", "pointer-events": "none", ...box }, group);
      label(group, node, fill, rank);
    }
    chart.replaceChildren(svg);
    byId("tree-found").textContent = state.words ? found + (found === 1 ? " box matches" : " boxes match") : "";
    byId("tree-out").disabled = state.focus === top;
    if (hasFocus) state.focus.group.focus();
  }
  function label(group, node, fill, rank) {
    const room = Math.floor((node.width - 10) / 6.9);
    if (room < 2) return;
    let words = node.label || "all requests";
    if (state.colour === "cause" && rank !== undefined) words = rank + 1 + " " + words;
    if (state.colour === "share" && node.own && room > words.length + 7) words += "  " + percent(shareOf(node));
    if (words.length > room) words = words.slice(0, Math.max(1, room - 1)) + "…";
    const name = state.colour === "share" ? fill.replace(/share-|cause-none/, "share-text-")
      : rank === undefined ? "" : "on-cause";
    make("text", { class: name, x: node.x + 5, y: node.depth * rowHeight + 16 }, group).textContent = words;
  }
  function drawLegend() {
    const legend = byId("tree-legend");
    legend.replaceChildren();
    const add = (name, words) => {
      const item = document.createElement("span");
      const swatch = make("svg", { class: "swatch", viewBox: "0 0 20 10", "aria-hidden": "true" });
      make("rect", { class: name, width: 20, height: 10 }, swatch);
      item.append(swatch, " " + words);
      legend.append(item);
    };
    if (state.colour === "share") {
      for (let step = 0; step < 5; step += 1) add("share-" + step, `${20 * step}–${20 * step + 20} % read`);
      legend.append("hatched: nothing read");
    } else {
      for (const [cause, rank] of ranks) add("cause-" + (rank % 7), `${rank + 1} ${cause} (${count(losses.get(cause))} lost)`);
      add("cause-none", "no loss");
    }
  }

  function zoom(node) {
    state.focus = node;
    draw(true);
    inform(node);
  }
  const nodeOf = (event) => {
    const group = event.target.closest("g.node");
    return group ? group.node : null;
  };
  chart.addEventListener("click", (event) => { const node = nodeOf(event); if (node) zoom(node); });
  chart.addEventListener("mouseover", (event) => { const node = nodeOf(event); if (node) inform(node); });
  chart.addEventListener("focusin", (event) => { const node = nodeOf(event); if (node) inform(node); });
  chart.addEventListener("keydown", (event) => {
    const node = nodeOf(event);
    if (!node) return;
    const above = nodes[node.parent];
    const beside = above && above.sorted ? above.sorted.filter((other) => other.width >= 1) : [node];
    const at = beside.indexOf(node);
    let next = null;
    if (event.key === "ArrowUp") next = above;
    else if (event.key === "ArrowDown") next = (node.sorted || []).find((child) => child.width >= 1);
    else if (event.key === "ArrowLeft") next = beside[at - 1];
    else if (event.key === "ArrowRight") next = beside[at + 1];
    else if (event.key === "Enter" || event.key === " ") zoom(node);
    else if (event.key === "Escape") zoom(nodes[state.focus.parent] || top);
    else return;
    event.preventDefault();
    if (next && next.group && next.group.isConnected) next.group.focus();
  });
  byId("tree-out").addEventListener("click", () => { state.focus = nodes[state.focus.parent] || top; draw(false); });
  byId("tree-colour").addEventListener("change", (event) => { state.colour = event.target.value; drawLegend(); draw(false); });
  byId("tree-order").addEventListener("change", (event) => { state.order = event.target.value; draw(false); });
  byId("tree-search").addEventListener("input", (event) => { state.words = event.target.value.trim().toLowerCase(); draw(false); });
  addEventListener("resize", () => draw(false));
  drawLegend();
  draw(false);
  inform(top);
})();
