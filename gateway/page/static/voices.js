// The voices, and what they sound like.

import { getJson, post } from "./api.js";
import { byId, make } from "./dom.js";
import { telling } from "./notices.js";

const sound = new Audio();

export const loadVoices = async () => (await getJson("/v1/audio/voices")).data;

// Plays the text of the section "Voices" in a voice.
export async function hear(model, voice) {
  const body = { model, input: byId("spoken").value.trim(), response_format: "wav", ...(voice ? { voice } : {}) };
  const file = await (await post("/v1/audio/speech", body)).blob();
  URL.revokeObjectURL(sound.src);
  sound.src = URL.createObjectURL(file);
  await sound.play();
}

export function setUpVoices(model, voices) {
  const own = voices.length ? voices : [{ name: "", default: true }];
  byId("voice-list").replaceChildren(...own.map((voice) => card(model, voice)));
}

function card(model, voice) {
  const name = voice.name || "the model's voice";
  const play = make("button", { type: "button", textContent: "Hear it", ariaLabel: `Hear ${name}` });
  const said = voice.default ? "default" : voice.type ? "uploaded" : "";
  play.addEventListener("click", telling(async () => {
    play.disabled = true;
    await hear(model.id, voice.name).finally(() => (play.disabled = false));
  }));
  return make("li", {}, make("span", { textContent: name }), make("span", { className: "hint", textContent: said }), play);
}
