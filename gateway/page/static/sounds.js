// Sounds of a prompt.

import { post } from "./api.js";
import { make } from "./dom.js";

// Makes one, and shows it in `work`.
export async function makeSound(body, _start, work) {
  work.progress(null, "being made");
  const response = await post("/v1/audio/generations", body, { signal: work.signal });
  const url = URL.createObjectURL(await response.blob());
  work.show(make("audio", { src: url, controls: true }));
  work.done(url, "sound.wav", `seed ${response.headers.get("x-quartet-seed")}`);
}
