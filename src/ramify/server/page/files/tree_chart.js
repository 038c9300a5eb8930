// The prefix tree as an icicle chart in SVG: pointer and keyboard, one active node.

import { shape } from "./dom.js";
import { count, counted, duration, oneLine } from "./format.js";
import { ROW, layOut } from "./tree_layout.js";

const AXIS = 18;
const CHAR = 6.7; // pixels of a character of the labels
const PAD = 5;
const MAX_BESIDE = 70; // characters
const LINE = 15; // pixels between two lines of a label

/** Draws nodes into `place`; `onActive(node)` and `onZoom(node or null)` are called back. */
export class TreeChart {
  constructor(place, { onActive, onZoom }) {
    this.place = place;
    this.onActive = onActive;
    this.onZoom = onZoom;
    this.active = null;
    this.svg = shape("svg", { role: "tree", tabindex: 0, "aria-label": "Prefix tree" });
    this.svg.addEventListener("keydown", (event) => this.pressed(event));
    this.svg.addEventListener("focus", () => this.active ?? this.activate(this.nodes?.[0]?.id));
    this.svg.addEventListener("click", (event) => this.clicked(event));
    this.svg.addEventListener("pointerover", (event) => this.hovered(event));
    this.outline = shape("rect", { class: "outline", rx: 2, "aria-hidden": "true" });
    place.append(this.svg);
    new ResizeObserver(() => this.nodes && this.draw()).observe(place);
  }

  /** Show nodes; the active one stays if it is among them. */
  show(nodes, { colour, matches }) {
    Object.assign(this, { nodes, colour, matches });
    if (!nodes.some((node) => node.id === this.active)) this.active = null;
    this.draw();
  }

  draw() {
    const width = Math.max(240, this.place.clientWidth);
    this.width = width;
    this.layout = layOut(this.nodes, width);
    const height = AXIS + Math.max(1, this.layout.numRows) * ROW;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    this.svg.classList.toggle("searching", this.matches !== null);
    this.groups = new Map();
    const boxes = [...this.layout.boxes.values()];
    const cells = boxes.map((box) => this.cell(box));
    // Apart from the cells, whose names for screen readers say more.
    const labels = shape(
      "g",
      { "aria-hidden": "true" },
      boxes.map((box) => this.label(box)),
    );
    this.svg.replaceChildren(...this.axis(width), ...cells, labels);
    this.mark();
  }

  /** Round numbers of tokens above the nodes. */
  axis(width) {
    const { first, last } = this.layout;
    if (!this.nodes.length) return [];
    const step = tickStep((last - first) / Math.max(2, width / 160));
    const labels = [];
    for (let token = Math.ceil(first / step) * step; token < last; token += step) {
      const x = ((token - first) / (last - first)) * width;
      if (x > width - 30) break;
      labels.push([x, token]);
    }
    return labels.map(([x, token], index) =>
      shape(
        "text",
        { class: "axis", x: x + PAD, y: 13, "aria-hidden": "true" },
        index ? count(token) : `token ${count(token)}`,
      ),
    );
  }

  cell(box) {
    const { node, x, width } = box;
    const [y, height] = [AXIS + box.row * ROW, box.rows * ROW];
    const siblings = box.parent ? box.parent.children : this.layout.roots;
    const group = shape("g", {
      id: cellId(node.id),
      class: this.classes(node),
      role: "treeitem",
      "data-id": node.id,
      "aria-level": levelOf(box),
      "aria-setsize": siblings.length,
      "aria-posinset": siblings.indexOf(box) + 1,
      "aria-label": labelOf(node),
    });
    group.append(shape("rect", { x, y, width, height, rx: 2 }));
    this.groups.set(node.id, group);
    return group;
  }

  /** The beginning of a node's text, in as many lines as it has room for. */
  label({ node, x, width, row, rows, children }) {
    const group = shape("g", { class: this.classes(node) });
    const more = node.is_cut ? " ⋯" : "";
    const text = (shortened(node.text) || counted(node.num_tokens, "token")) + more;
    const room = Math.floor((width - 2 * PAD) / CHAR);
    const y = AXIS + row * ROW + 14;
    // Beside a short node that nothing follows there is room for its text.
    const beside = Math.floor((this.width - x - width - 2 * PAD) / CHAR);
    if (!children.length && room < text.length && beside > room) {
      const line = oneLine(text, Math.min(beside, MAX_BESIDE));
      group.append(shape("text", { class: "beside", x: x + width + PAD, y }, line));
      return group;
    }
    linesOf(text, room, rows).forEach((line, index) => {
      group.append(shape("text", { x: x + PAD, y: y + index * LINE }, line));
    });
    return group;
  }

  classes(node) {
    const classes = [this.colour(node)];
    if (node.tier !== "pool") classes.push("evicted");
    if (this.matches?.has(node.id)) classes.push("match");
    return classes.join(" ");
  }

  mark() {
    for (const [id, group] of this.groups) {
      group.setAttribute("aria-selected", String(id === this.active));
    }
    const group = this.groups.get(this.active);
    if (!group) {
      this.svg.removeAttribute("aria-activedescendant");
      this.outline.remove();
      return;
    }
    this.svg.setAttribute("aria-activedescendant", group.id);
    const rect = group.querySelector("rect");
    for (const name of ["x", "y", "width", "height"]) {
      this.outline.setAttribute(name, rect.getAttribute(name));
    }
    this.svg.append(this.outline); // over the neighbours
  }

  /** Make a node the active one; undefined: leave it. */
  activate(id, { scroll = false } = {}) {
    if (id === undefined || !this.groups.has(id)) return;
    this.active = id;
    this.mark();
    if (scroll) this.groups.get(id).scrollIntoView({ block: "nearest" });
    this.onActive(this.layout.boxes.get(id).node);
  }

  clicked(event) {
    const node = this.nodeAt(event);
    if (!node) return;
    this.activate(node.id);
    this.onZoom(node);
  }

  hovered(event) {
    const node = this.nodeAt(event);
    if (node) this.activate(node.id);
  }

  nodeAt(event) {
    const group = event.target.closest?.("g[data-id]");
    return group ? this.layout.boxes.get(Number(group.dataset.id))?.node : null;
  }

  pressed(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || !this.nodes.length) return;
    const box = this.layout.boxes.get(this.active) ?? this.layout.roots[0];
    const go = {
      ArrowRight: () => this.go(box.children[0]),
      ArrowLeft: () => this.go(box.parent),
      ArrowDown: () => this.go(this.sibling(box, 1)),
      ArrowUp: () => this.go(this.sibling(box, -1)),
      Home: () => this.go(this.layout.roots[0]),
      End: () => this.go(this.layout.roots.at(-1)),
      Enter: () => this.onZoom(box.node),
      " ": () => this.onZoom(box.node),
      Escape: () => this.onZoom(null),
      Backspace: () => this.onZoom(null),
    }[event.key];
    if (!go) return;
    event.preventDefault();
    go();
  }

  go(box) {
    if (box) this.activate(box.node.id, { scroll: true });
  }

  /** The node above or below, also of another parent. */
  sibling(box, by) {
    const level = levelOf(box);
    const peers = [...this.layout.boxes.values()].filter((each) => levelOf(each) === level);
    peers.sort((a, b) => a.row - b.row);
    return peers[peers.indexOf(box) + by];
  }
}

/** 1, 2 or 5 times a power of ten, at least `least`. */
function tickStep(least) {
  const power = Math.pow(10, Math.floor(Math.log10(Math.max(1, least))));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
}

/** A text with one mark in place of the special tokens and line breaks between two messages. */
function shortened(text) {
  return text.replace(/(?:<\|[^|>\n]{1,40}\|>|\s*\n\s*)+/g, " ┊ ").replace(/^[\s┊]+|[\s┊]+$/g, "");
}

/** A text in at most as many lines as fit into `rows`, of `room` characters each. */
function linesOf(text, room, rows) {
  if (room < 2) return [];
  const most = room < 24 ? 1 : Math.max(1, Math.floor((rows * ROW - 6) / LINE));
  const chars = [...oneLine(text, room * most)];
  const lines = [];
  while (chars.length && lines.length < most) lines.push(chars.splice(0, room).join(""));
  return lines;
}

function levelOf(box) {
  let level = 1;
  for (let above = box.parent; above; above = above.parent) level += 1;
  return level;
}

function cellId(id) {
  return `node-${id}`;
}

function labelOf(node) {
  const hits = node.is_own ? `, ${counted(node.hits, "hit")}` : "";
  return `${counted(node.num_tokens, "token")}${hits}: ${oneLine(node.text, 60)}`;
}

/** What is known of a node, in words. */
export function detailsOf(node) {
  const end = node.start + node.num_tokens;
  const facts = [`${counted(node.num_tokens, "token")} (${count(node.start)} to ${count(end)})`];
  if (node.is_own) {
    facts.push(
      counted(node.hits, "hit"),
      node.leases ? `held by ${counted(node.leases, "lease")}` : "not held",
    );
  } else facts.push("a prefix that is shared with other tenants");
  if (node.tier !== "pool") {
    const place = node.tier === "evicted" ? "evicted" : `in tier ${node.tier}`;
    facts.push(`${count(node.num_tokens - node.cached_tokens)} of its tokens ${place}`);
  } else facts.push("in the pool");
  if (node.is_own)
    facts.push(`last used ${duration(node.idle_s)} ago`, `${duration(node.age_s)} old`);
  if (node.is_pending) facts.push("being computed");
  if (node.is_stale) facts.push("of earlier weights, never hit again");
  if (node.tenant) facts.push(`tenant ${node.tenant}`);
  if (node.replica !== null) facts.push(`engine ${node.replica}`);
  return facts.join(" · ");
}
