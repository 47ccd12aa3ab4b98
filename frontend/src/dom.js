// Elements in one expression.

/** h("button", { class: "x", onclick }, "text", child): a DOM element. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Sets a text only where it differs: nothing to lay out, nothing to read aloud. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
