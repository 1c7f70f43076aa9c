// Files that go with a message: dropped, pasted or picked.

import { byId, make } from "./dom.js";
import { notice } from "./notices.js";

const PLAIN_PICTURES = new Set(["image/png", "image/jpeg", "image/webp", "image/gif"]);
const MAX_PICTURE_BYTES = 4_000_000, MAX_SIDE_PX = 2048; // a larger one is made smaller: events have a limit
const SOUND_FORMATS = ["wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "webm"];
const SOUND_NAMES = { mpeg: "mp3", "x-wav": "wav", wave: "wav", "x-flac": "flac", "x-m4a": "m4a", mp4: "m4a" };

export class Attachments {
  #files = [];
  #list = byId("attached");

  constructor() {
    const pick = byId("pick"), zone = byId("talk");
    byId("attach").addEventListener("click", () => pick.click());
    pick.addEventListener("change", () => {
      this.add(pick.files);
      pick.value = "";
    });
    byId("message").addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.add(event.clipboardData.files);
    });
    for (const kind of ["dragenter", "dragover"]) zone.addEventListener(kind, (event) => dragged(event, zone));
    zone.addEventListener("dragleave", (event) => event.target === zone && zone.classList.remove("dropping"));
    zone.addEventListener("drop", (event) => {
      event.preventDefault();
      zone.classList.remove("dropping");
      this.add(event.dataTransfer.files);
    });
  }

  add(files) {
    for (const file of files) {
      if (kindOf(file)) this.#files.push(file);
      else notice(`${file.name}: the model reads pictures, films, sounds and texts; this is ${file.type || "none of them"}.`);
    }
    this.#show();
  }

  // {images, media, text} of the files, and none are left. A file that cannot be read is told of, and stays out.
  async take() {
    const taken = { images: [], media: [], text: "" }, files = this.#files;
    this.#files = [];
    this.#show();
    for (const file of files) {
      try {
        await READERS[kindOf(file)](file, taken);
      } catch (error) {
        notice(`${file.name} cannot be read: ${error.message}`);
      }
    }
    return taken;
  }

  #show() {
    this.#list.replaceChildren(...this.#files.map((file) => this.#chip(file)));
  }

  #chip(file) {
    const remove = make("button", { type: "button", className: "quiet", textContent: "Remove", ariaLabel: `Remove ${file.name}` });
    remove.addEventListener("click", () => {
      this.#files = this.#files.filter((each) => each !== file);
      this.#show();
      byId("message").focus();
    });
    return make("li", {}, make("span", { textContent: file.name || "picture" }), remove);
  }
}

function dragged(event, zone) {
  if (!event.dataTransfer.types.includes("Files")) return;
  event.preventDefault();
  zone.classList.add("dropping");
}

function kindOf({ type, name }) {
  const [kind] = type.split("/");
  if (["image", "video", "audio"].includes(kind)) return kind;
  return kind === "text" || /\.(txt|md|csv|json|xml|ya?ml|toml|py|js|ts|c|h|cpp|rs|go|java|sh|log)$/i.test(name) ? "text" : null;
}

const READERS = {
  async image(file, taken) {
    taken.images.push(await pictureUrl(file));
  },
  async video(file, taken) {
    taken.media.push({ name: file.name, part: { type: "video_url", video_url: { url: await dataUrl(file) } } });
  },
  async audio(file, taken) {
    const url = await dataUrl(file), input_audio = { data: url.slice(url.indexOf(",") + 1), format: soundFormat(file) };
    taken.media.push({ name: file.name, part: { type: "input_audio", input_audio } });
  },
  async text(file, taken) {
    taken.text += `\n\n${file.name}:\n${await file.text()}`;
  },
};

function soundFormat({ type, name }) {
  const own = type.split("/")[1].split(";")[0], format = SOUND_NAMES[own] ?? own;
  if (SOUND_FORMATS.includes(format)) return format;
  throw new Error(`${name.split(".").pop()} is none of ${SOUND_FORMATS.join(", ")}`);
}

// A picture as a data URL; one that is large, or of a rare kind, as a smaller JPEG.
async function pictureUrl(file) {
  if (PLAIN_PICTURES.has(file.type) && file.size <= MAX_PICTURE_BYTES) return dataUrl(file);
  const bitmap = await createImageBitmap(file), scale = Math.min(1, MAX_SIDE_PX / Math.max(bitmap.width, bitmap.height));
  const canvas = make("canvas", { width: Math.round(bitmap.width * scale), height: Math.round(bitmap.height * scale) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

export function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
