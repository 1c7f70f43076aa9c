// The section "Make": pictures, videos and sounds of a prompt, where there is a model for them.

import { byId, make } from "./dom.js";
import { makePicture } from "./pictures.js";
import { makeSound } from "./sounds.js";
import { makeVideo } from "./videos.js";

const KINDS = [
  { name: "image", label: "Picture", work: makePicture, prompt: "What it shows", fields: ["size-field", "start-field"] },
  { name: "video", label: "Video", work: makeVideo, prompt: "What it shows", fields: ["size-field", "seconds-field", "start-field"] },
  { name: "audio", label: "Sound", work: makeSound, prompt: "What it sounds like", fields: ["seconds-field"] },
];
const STARTS = { image: "image_edit", video: "image_to_video" }; // tasks that start from a picture
const FRESH = { image: "text_to_image", video: "text_to_video" }; // and those that start from none

// What the models of /v1/models make beside answers: [{kind, model, tasks}].
export function makers(models) {
  // one that answers, too, is listed once
  const dits = models.map(({ id, quartet }) => ({ id, quartet: quartet.dit ?? quartet })).filter(({ quartet }) => quartet.tasks);
  return KINDS.flatMap((kind) => {
    const model = dits.find((each) => each.quartet.output_modalities.includes(kind.name));
    return model ? [{ ...kind, model: model.id, tasks: model.quartet.tasks }] : [];
  });
}

export function setUpMake(kinds) {
  const chosen = () => kinds.find(({ name }) => byId(`make-${name}`).checked);
  byId("make-kinds").append(...kinds.map((kind, i) => choice(kind, i === 0)));
  byId("make-kinds").hidden = kinds.length === 1;
  byId("make-kinds").addEventListener("change", () => fit(chosen()));
  fit(chosen());
  byId("make-form").addEventListener("submit", (event) => {
    event.preventDefault();
    begin(chosen());
  });
}

function choice({ name, label }, checked) {
  const input = make("input", { type: "radio", name: "kind", id: `make-${name}`, checked });
  return make("label", {}, input, ` ${label}`);
}

// Shows the fields that the kind has.
function fit(kind) {
  for (const id of ["size-field", "seconds-field", "start-field"]) byId(id).hidden = !kind.fields.includes(id);
  if (!kind.tasks.includes(STARTS[kind.name])) byId("start-field").hidden = true;
  byId("start").required = !byId("start-field").hidden && !kind.tasks.includes(FRESH[kind.name]);
  byId("start-label").textContent = `Picture to start from${byId("start").required ? "" : ", if any"}`;
  document.querySelector("label[for=prompt]").textContent = kind.prompt;
}

// The request's members; numbers that were left out are the model's.
function asked(kind) {
  const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
  const shown = (id, value) => (byId(id).hidden ? undefined : value);
  return {
    model: kind.model,
    prompt: byId("prompt").value.trim(),
    size: shown("size-field", byId("size").value.trim() || undefined),
    seconds: shown("seconds-field", number("seconds")),
    num_inference_steps: number("steps"),
    seed: number("seed"),
  };
}

async function begin(kind) {
  const body = asked(kind), [start] = byId("start-field").hidden ? [] : byId("start").files;
  const shown = new Work(body.prompt);
  byId("made").prepend(shown.item);
  try {
    await kind.work(body, start, shown);
  } catch (error) {
    shown.fail(error);
  }
}

// Something that is being made, as it is seen.
class Work {
  #progress = make("progress", { max: 100, ariaLabel: "Progress" });
  #state = make("p", { className: "facts", role: "status", textContent: "waiting ..." });
  #shown = make("div", { className: "result" });
  #buttons = make("div", { className: "actions" });
  #abort = new AbortController();

  constructor(prompt) {
    const cancel = make("button", { type: "button", textContent: "Cancel" });
    cancel.addEventListener("click", () => this.#abort.abort());
    this.#buttons.append(cancel);
    this.item = make("li", {}, make("p", { textContent: prompt }), this.#shown, this.#progress, this.#state, this.#buttons);
  }

  // Aborted when the user cancels it.
  get signal() {
    return this.#abort.signal;
  }

  // `percent` of it is done; null: not known.
  progress(percent, text) {
    if (percent === null) this.#progress.removeAttribute("value");
    else this.#progress.value = percent;
    this.#state.textContent = text;
  }

  show(element) {
    this.#shown.replaceChildren(element);
  }

  // It is all there: the file's URL and name.
  done(url, name, text) {
    this.#progress.remove();
    this.#state.textContent = text;
    this.#buttons.replaceChildren(make("a", { href: url, download: name, textContent: "Save" }), this.#removal(url));
  }

  fail(error) {
    this.#progress.remove();
    this.#state.textContent = error.name === "AbortError" ? "cancelled" : error.message;
    this.#state.classList.toggle("bad", error.name !== "AbortError");
    this.#buttons.replaceChildren(this.#removal());
  }

  #removal(url) {
    const remove = make("button", { type: "button", textContent: "Remove" });
    remove.addEventListener("click", () => {
      if (url?.startsWith("blob:")) URL.revokeObjectURL(url);
      this.item.remove();
      byId("prompt").focus();
    });
    return remove;
  }
}
