// An answer by /v1/chat/completions, as it is made.

import { eventsOf, post } from "./api.js";
import { fromBase64, toFloats } from "./pcm.js";

// Yields {text} and {samples}, the latter of -1 to 1 at the player's rate.
export async function* completion({ messages, settings, signal }) {
  const { model, modality, voice, rateHz } = settings;
  const spoken = { modalities: ["text", "audio"], audio: { format: "pcm16", ...(voice ? { voice } : {}) } };
  const hears = { thinker: { use_audio_in_video: true } }; // of films, their sound track too
  const body = { model, messages, stream: true, quartet: hears, ...(modality === "audio" ? spoken : { modalities: ["text"] }) };
  for await (const { choices } of eventsOf(await post("/v1/chat/completions", body, { signal }))) {
    const delta = choices[0]?.delta ?? {};
    if (delta.content) yield { text: delta.content };
    if (delta.audio?.data) yield { samples: toFloats(fromBase64(delta.audio.data), rateHz) };
  }
}
