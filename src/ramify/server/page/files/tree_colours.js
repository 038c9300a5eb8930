// The colour class of a node, and what the colours mean.

const TIERS = ["pool", "host", "disk", "remote", "evicted"];
const AGES_S = [5, 60, 600, 3600]; // the last use, from the darkest to the lightest
const AGE_NAMES = ["5 s ago or less", "a minute", "ten minutes", "an hour", "longer"];

/** A function from a node to its class. */
export function colourer(by, nodes) {
  if (by === "tier") return (node) => `tier-${TIERS.includes(node.tier) ? node.tier : "evicted"}`;
  if (by === "age") return (node) => (node.is_own ? `heat-${4 - step(node.idle_s)}` : "heat-0");
  const most = Math.max(1, ...nodes.map((node) => node.hits));
  return (node) => `heat-${node.hits ? heat(node.hits, most) : 0}`;
}

/** Classes and names for the legend. */
export function legendOf(by, nodes) {
  if (by === "tier") {
    const seen = new Set(nodes.map((node) => node.tier));
    return TIERS.filter((tier) => seen.has(tier)).map((tier) => [
      `tier-${tier}`,
      tier === "evicted" ? "evicted, its tokens remembered" : tier,
    ]);
  }
  if (by === "age") return AGE_NAMES.map((name, index) => [`heat-${4 - index}`, name]);
  const most = Math.max(1, ...nodes.map((node) => node.hits));
  const least = [1, 2, 3, 4].map((level) => Math.ceil(Math.pow(most, (level - 1) / 4) || 1));
  const names = least.map((hits) => (hits === 1 ? "1 hit" : `${hits} hits or more`));
  const steps = names.map((name, index) => [`heat-${index + 1}`, name]);
  const distinct = steps.filter(([, name], index) => names.indexOf(name, index + 1) < 0);
  return [["heat-0", "no hit"], ...distinct];
}

function heat(hits, most) {
  let level = 1;
  while (level < 4 && hits >= Math.ceil(Math.pow(most, level / 4))) level += 1;
  return level;
}

function step(idle) {
  const index = AGES_S.findIndex((limit) => idle <= limit);
  return index < 0 ? 4 : index;
}
