// The conversation as it is seen.

import { byId, make } from "./dom.js";

const NAMES = { user: "You", assistant: "Model" };
const NEAR_PX = 80; // of the end: who reads further up is left there

export class Transcript {
  #log = byId("transcript");
  #turns = new Map();

  // A turn named `id`. While it is `busy`, screen readers wait with it.
  add(id, role, { text = "", images = [], files = [], busy = false } = {}) {
    const parts = {
      text: make("p", { className: "text", textContent: text }),
      facts: make("p", { className: "facts" }),
    };
    const shown = make("article", { className: `turn ${role}` }, make("h3", { textContent: NAMES[role] }));
    if (images.length) shown.append(make("div", { className: "pictures" }, ...images.map((src) => make("img", { src, alt: "picture you sent" }))));
    if (files.length) shown.append(make("p", { className: "files", textContent: files.join(", ") }));
    shown.append(parts.text, parts.facts);
    this.#turns.set(id, { shown, ...parts, facts: new Map(), factsLine: parts.facts });
    byId("welcome").hidden = true;
    this.busy(id, busy);
    this.#keepingEnd(() => this.#log.append(shown));
  }

  busy(id, busy) {
    this.#turns.get(id)?.shown.setAttribute("aria-busy", String(busy));
  }

  append(id, text) {
    this.#keepingEnd(() => this.#turns.get(id)?.text.append(text));
  }

  set(id, text) {
    this.#keepingEnd(() => this.#turns.get(id)?.text.replaceChildren(text));
  }

  // Says in grey what is so while there is no text yet.
  hint(id, text) {
    const turn = this.#turns.get(id);
    if (turn && !turn.text.textContent) turn.text.replaceChildren(make("span", { className: "hint", textContent: text }));
    else if (turn?.text.querySelector(".hint")) turn.text.querySelector(".hint").textContent = text;
  }

  // Of an answer that was interrupted: what was heard, and then, struck out, what was not.
  heard(id, text) {
    const turn = this.#turns.get(id);
    if (!turn) return;
    const rest = turn.text.textContent.slice(text.length);
    turn.text.replaceChildren(text, ...(rest.trim() ? [make("s", { className: "unheard", textContent: rest })] : []));
  }

  // A fact below the turn, in the place of an earlier one of that name; `value` is kept as data-NAME.
  fact(id, name, text, value = "") {
    const turn = this.#turns.get(id);
    if (!turn) return;
    turn.facts.set(name, text);
    turn.shown.dataset[name] = value;
    this.#keepingEnd(() => (turn.factsLine.textContent = [...turn.facts.values()].filter(Boolean).join(" · ")));
  }

  remove(id) {
    this.#turns.get(id)?.shown.remove();
    this.#turns.delete(id);
  }

  clear() {
    for (const id of [...this.#turns.keys()]) this.remove(id);
    byId("welcome").hidden = false;
  }

  #keepingEnd(change) {
    const log = this.#log, isNear = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_PX;
    change();
    if (isNear) log.scrollTop = log.scrollHeight;
  }
}
