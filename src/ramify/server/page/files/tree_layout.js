// Rectangles of an icicle chart: tokens run to the right, as in a prompt; branches lie below each other.

export const ROW = 20;
const MIN_WIDTH = 4;

/**
 * The place of each node: `x` and `width` in pixels, `row` and `rows` of its leaves.
 *
 * Nodes come parents first. The width of a node is its number of tokens. What follows a node begins
 * where it ends, so that a short node stays visible beside a long one.
 */
export function layOut(nodes, width) {
  const known = new Set(nodes.map((node) => node.id));
  const boxes = new Map();
  const roots = [];
  let [first, last] = [Infinity, 1];
  for (const node of nodes) {
    const parent = known.has(node.parent) ? boxes.get(node.parent) : null;
    const box = { node, parent, children: [], row: 0, rows: 1 };
    boxes.set(node.id, box);
    (parent ? parent.children : roots).push(box);
    first = Math.min(first, node.start);
    last = Math.max(last, node.start + node.num_tokens);
  }
  const all = [...boxes.values()];
  for (const box of all.toReversed()) {
    box.rows = Math.max(1, sumRows(box.children));
  }
  placeRows(roots, 0);
  for (const box of all) placeRows(box.children, box.row);
  const perToken = Number.isFinite(first) ? width / (last - first) : 1;
  for (const box of all) {
    box.x = Math.min((box.node.start - first) * perToken, width - MIN_WIDTH);
    box.width = Math.max(MIN_WIDTH, Math.min(box.node.num_tokens * perToken, width - box.x));
  }
  return { boxes, roots, numRows: sumRows(roots), first, last };
}

function sumRows(boxes) {
  return boxes.reduce((rows, box) => rows + box.rows, 0);
}

function placeRows(boxes, row) {
  for (const box of boxes) {
    box.row = row;
    row += box.rows;
  }
}
