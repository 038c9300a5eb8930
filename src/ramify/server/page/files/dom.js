// Elements. Text of prompts enters the page as text nodes only, so that none of it is ever markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; a string child is a text node, null is left out. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** The same in SVG. */
export function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null));
  return node;
}

/** The element of the page with this id. */
export function byId(id) {
  return document.getElementById(id);
}
