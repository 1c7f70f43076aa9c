// Samples as the API has them: PCM of 16 bits, mono, in base64.

import { bytesOf } from "./api.js";

export const RATE_HZ = 24_000;
const SLICE = 0x8000; // arguments of a call have a limit

export function toBase64(bytes) {
  let text = "";
  for (let i = 0; i < bytes.length; i += SLICE) text += String.fromCharCode(...bytes.subarray(i, i + SLICE));
  return btoa(text);
}

export function fromBase64(text) {
  const bytes = bytesOf(text);
  return new Int16Array(bytes.buffer, 0, bytes.length >> 1);
}

// Samples of -1 to 1, at RATE_HZ; by straight lines between those of another rate.
export function toFloats(samples, rateHz = RATE_HZ) {
  const count = Math.round((samples.length * RATE_HZ) / rateHz), floats = new Float32Array(count);
  for (let i = 0; i < count; i++) {
    const at = (i * rateHz) / RATE_HZ, before = Math.min(Math.floor(at), samples.length - 1);
    const after = Math.min(before + 1, samples.length - 1);
    floats[i] = (samples[before] + (samples[after] - samples[before]) * (at - before)) / 32768;
  }
  return floats;
}
