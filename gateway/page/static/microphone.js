// The user's microphone, with echo cancellation: the model's own voice must not interrupt it.

import { RATE_HZ } from "./pcm.js";

const WANTED = { channelCount: 1, echoCancellation: true, noiseSuppression: true, autoGainControl: true };

export class Microphone {
  #stream = null;
  #context = null;

  // Opens it; `onChunk(pcm, rms)` gets 40 ms at a time. Rejects with what the user can do.
  async open(onChunk) {
    this.#stream = await allowed();
    try {
      const [context, source] = connected(this.#stream);
      this.#context = context;
      await context.audioWorklet.addModule("/page/microphone-worklet.js");
      const node = new AudioWorkletNode(context, "microphone", { numberOfOutputs: 0 });
      node.port.onmessage = ({ data }) => onChunk(new Uint8Array(data.pcm), data.rms);
      source.connect(node);
      await context.resume();
    } catch (error) {
      this.close();
      throw error;
    }
  }

  // What it hears, for a call; null while it is closed.
  get track() {
    return this.#stream?.getTracks()[0] ?? null;
  }

  close() {
    for (const track of this.#stream?.getTracks() ?? []) track.stop();
    this.#context?.close();
    this.#stream = this.#context = null;
  }
}

// Some browsers connect a microphone only to a context of its own rate; the worklet changes that one.
function connected(stream) {
  const context = new AudioContext({ sampleRate: RATE_HZ });
  try {
    return [context, context.createMediaStreamSource(stream)];
  } catch {
    context.close();
    const own = new AudioContext();
    return [own, own.createMediaStreamSource(stream)];
  }
}

async function allowed() {
  if (!navigator.mediaDevices?.getUserMedia) {
    throw new Error("Browsers give the microphone only to pages of https:// or of localhost. Open this page so.");
  }
  try {
    return await navigator.mediaDevices.getUserMedia({ audio: WANTED });
  } catch (error) {
    throw new Error(WHY[error.name] ?? `The microphone cannot be used: ${error.message}`);
  }
}

const WHY = {
  NotAllowedError: "The browser does not give this page the microphone. Allow it beside the address, and press Talk again.",
  NotFoundError: "There is no microphone. Connect one, and press Talk again; or write.",
  NotReadableError: "The microphone is in use by another program. Close that, and press Talk again.",
};
