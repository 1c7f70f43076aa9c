// What went wrong, in the server's own words, until the user closes it.

import { byId, make } from "./dom.js";

const MOST = 3;

// Shows an error. What the user cancelled is none.
export function notice(error) {
  if (error?.name === "AbortError") return;
  const text = error?.message ?? String(error);
  const shown = byId("notices");
  for (const old of [...shown.children]) if (old.firstChild.textContent === text) old.remove();
  while (shown.children.length >= MOST) shown.firstChild.remove();
  const close = make("button", { type: "button", className: "quiet", textContent: "Close" });
  const box = make("div", { className: "notice" }, make("span", { textContent: text }), close);
  close.addEventListener("click", () => box.remove());
  shown.append(box);
}

// `action`, whose failure is shown.
export const telling = (action) => async (...given) => {
  try {
    return await action(...given);
  } catch (error) {
    notice(error);
    return undefined;
  }
};
