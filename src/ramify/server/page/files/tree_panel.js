// The panel of the prefix tree: reads branches on demand, zoom, search, colours, details.

import { getJson } from "./api.js";
import { byId, element, shape } from "./dom.js";
import { count, counted, oneLine } from "./format.js";
import { TreeChart, detailsOf } from "./tree_chart.js";
import { colourer, legendOf } from "./tree_colours.js";

const MAX_NODES = 240;
const LEVELS = 12;
// A search looks at as many nodes as the server gives, and draws those that match.
const SEARCHED = { nodes: 1000, levels: 64 };
const TYPING_MS = 300;

export class TreePanel {
  constructor() {
    this.path = []; // nodes zoomed into, outermost first
    this.view = { nodes: [], is_cut: false, num_nodes: null };
    this.chart = new TreeChart(byId("tree-chart"), {
      onActive: (node) => this.describe(node),
      onZoom: (node) => this.zoom(node),
    });
    byId("tree-colour").addEventListener("change", () => this.draw());
    byId("tree-search").addEventListener("input", () => this.searchSoon());
    byId("tree-search").addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.nextMatch();
    });
  }

  /** Read the branches below the node zoomed into, and draw them. */
  async refresh() {
    const below = this.path.at(-1)?.id ?? 0;
    const words = searchWords();
    const [most, levels] = words ? [SEARCHED.nodes, SEARCHED.levels] : [MAX_NODES, LEVELS];
    try {
      const view = await getJson(
        `v1/cache/branches?below=${below}&max_nodes=${most}&levels=${levels}`,
      );
      if (below !== (this.path.at(-1)?.id ?? 0) || words !== searchWords()) return; // meanwhile
      const num_searched = view.nodes.length;
      this.view = {
        ...view,
        num_searched,
        nodes: words ? withMatches(view.nodes, words) : view.nodes,
      };
    } catch (error) {
      if (error.status !== 404 || !below) throw error;
      this.path.pop(); // it was evicted
      return this.refresh();
    }
    this.draw();
  }

  /** Mark what matches among the nodes that are there; read further ones when nobody types. */
  searchSoon() {
    this.draw();
    clearTimeout(this.typing);
    this.typing = setTimeout(() => this.refresh().catch((error) => this.fail(error)), TYPING_MS);
  }

  draw() {
    const { nodes } = this.view;
    const by = byId("tree-colour").querySelector(":checked").value;
    const words = searchWords();
    this.matches = words ? new Set(nodes.filter(contains(words)).map((node) => node.id)) : null;
    this.chart.show(nodes, { colour: colourer(by, nodes), matches: this.matches });
    byId("tree-count").textContent = this.countText();
    byId("tree-legend").replaceChildren(...legend(legendOf(by, nodes)));
    byId("tree-legend").hidden = !nodes.length;
    byId("tree-path").replaceChildren(...this.pathButtons());
    byId("tree-path").hidden = !this.path.length;
    if (!nodes.length) byId("tree-details").replaceChildren(emptyText());
    else if (this.chart.active === null) byId("tree-details").replaceChildren(hint());
  }

  countText() {
    const { nodes, num_nodes: all, is_cut: isCut } = this.view;
    if (this.matches) {
      const looked = this.view.num_searched ?? nodes.length;
      const more = isCut || nodes.some((node) => node.is_cut) ? "; there are more" : "";
      return `${count(this.matches.size)} of ${counted(looked, "node")} match${more}`;
    }
    if (all !== null && all > nodes.length && !this.path.length) {
      return `${count(nodes.length)} of ${counted(all, "node")}, those with most hits`;
    }
    return (
      counted(nodes.length, "node") +
      (isCut || nodes.some((node) => node.is_cut) ? " and more" : "")
    );
  }

  describe(node) {
    const parts = [element("p", {}, detailsOf(node))];
    if (node.text) parts.push(element("div", { class: "text" }, node.text));
    byId("tree-details").replaceChildren(...parts);
  }

  /** Show what follows a node; null: one level out. */
  zoom(node) {
    if (node && node.id === this.path.at(-1)?.id) node = null;
    if (!node && !this.path.length) return;
    if (!node) this.path.pop();
    else this.path.push(node);
    this.refresh().catch((error) => this.fail(error));
  }

  fail(error) {
    byId("tree-details").replaceChildren(element("p", { class: "failure" }, error.message));
  }

  nextMatch() {
    const ids = [...(this.matches ?? [])];
    if (!ids.length) return;
    const next = ids[(ids.indexOf(this.chart.active) + 1) % ids.length];
    this.chart.activate(next, { scroll: true });
  }

  pathButtons() {
    const button = (text, length) => {
      const node = element("button", { type: "button", class: "quiet" }, text);
      node.addEventListener("click", () => {
        this.path.length = length;
        this.refresh().catch((error) => this.fail(error));
        byId("tree-chart").firstChild.focus();
      });
      return node;
    };
    const steps = this.path.map((node, index) =>
      button(oneLine(node.text || counted(node.num_tokens, "token"), 40), index + 1),
    );
    return [button("All prompts", 0), ...steps.flatMap((step) => [element("span", {}, "›"), step])];
  }
}

function searchWords() {
  return byId("tree-search").value.trim().toLowerCase();
}

/** The nodes that match, and what leads to them, as many as are drawn; the first ones if none does. */
function withMatches(nodes, words) {
  const known = new Map(nodes.map((node) => [node.id, node]));
  const kept = new Set();
  for (const match of nodes.filter(contains(words))) {
    if (kept.size >= MAX_NODES) break;
    for (let node = match; node && !kept.has(node.id); node = known.get(node.parent)) {
      kept.add(node.id);
    }
  }
  if (!kept.size) return nodes.slice(0, MAX_NODES);
  return nodes.filter((node) => kept.has(node.id));
}

function contains(words) {
  return (node) =>
    node.text.toLowerCase().includes(words) || node.tenant.toLowerCase().includes(words);
}

function legend(entries) {
  return entries.map(([kind, name]) => {
    const swatch = shape(
      "svg",
      { class: kind, "aria-hidden": "true" },
      shape("rect", { width: 12, height: 12, rx: 2 }),
    );
    return element("span", {}, swatch, name);
  });
}

function emptyText() {
  return element(
    "p",
    { class: "empty" },
    "Nothing is cached yet. Ask a question below, then another one: the second reads what the first has computed.",
  );
}

function hint() {
  return element(
    "p",
    { class: "hint" },
    "Tokens run to the right, as in a prompt; what follows the same beginning lies side by side. ",
    "Point at a node, or use the arrow keys, to read it; Enter zooms in, Escape out.",
  );
}
