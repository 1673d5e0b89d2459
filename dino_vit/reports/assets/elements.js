"use strict";

function append(parent, child, attributes, text) {
  for (const [key, value] of Object.entries(attributes)) child.setAttribute(key, value);
  if (text !== undefined) child.textContent = text;
  parent.append(child);
  return child;
}

function element(parent, name, attributes = {}, text) {
  return append(parent, document.createElement(name), attributes, text);
}

const data = JSON.parse(document.getElementById("data").textContent);

