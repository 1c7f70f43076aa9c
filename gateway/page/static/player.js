// Plays the model's answers, by the audio clock: what was played when is known to the sample.

import { RATE_HZ } from "./pcm.js";

export class Player {
  #context = null;
  #node = null;
  #ready = null;
  #stopped = []; // who waits for what had been played
  #open = new Set();

  // Called with an item's id, and the `performance.now()` at which its first sample is heard.
  onStarted = () => {};
  // Called with an item's id and the milliseconds played, when all of it was.
  onEnded = () => {};
  onLevel = () => {};

  // Makes sound possible; browsers want that to begin with the user's doing something.
  open() {
    this.#ready ??= this.#make();
    return this.#ready;
  }

  async #make() {
    this.#context = new AudioContext({ sampleRate: RATE_HZ, latencyHint: "interactive" });
    await this.#context.audioWorklet.addModule("/page/player-worklet.js");
    this.#node = new AudioWorkletNode(this.#context, "player", { numberOfInputs: 0, outputChannelCount: [1] });
    this.#node.port.onmessage = ({ data }) => this.#hear(data);
    this.#node.connect(this.#context.destination);
    await this.#context.resume();
  }

  get playing() {
    return this.#open.size > 0;
  }

  // More of an item: samples of -1 to 1 at RATE_HZ.
  async add(id, samples) {
    this.#open.add(id);
    await this.open();
    this.#node.port.postMessage({ do: "add", id, samples }, [samples.buffer]);
  }

  // All of the item was added.
  async end(id) {
    if (!this.#open.has(id)) return;
    await this.open();
    this.#node.port.postMessage({ do: "end", id });
  }

  // Silence at once. The items that were not played to their ends: [{id, ms}], ms being what was heard of each.
  async stop() {
    if (!this.playing) return [];
    this.#open.clear();
    await this.open();
    const told = new Promise((resolve) => this.#stopped.push(resolve));
    this.#node.port.postMessage({ do: "stop" });
    const delay = this.#context.outputLatency || 0;
    return (await told).map(({ id, played }) => ({ id, ms: Math.max(0, Math.floor((played / RATE_HZ - delay) * 1000)) }));
  }

  #hear(data) {
    if (data.told === "level") this.onLevel(data.rms);
    else if (data.told === "started") this.onStarted(data.id, this.#heardAt(data.at));
    else if (data.told === "stopped") this.#stopped.shift()?.(data.stopped);
    else {
      this.#open.delete(data.id);
      this.onEnded(data.id, Math.round((data.played / RATE_HZ) * 1000));
    }
  }

  // When what the audio clock calls `time` is heard, on the page's clock.
  #heardAt(time) {
    const { contextTime, performanceTime } = this.#context.getOutputTimestamp();
    if (contextTime && performanceTime) return performanceTime + (time - contextTime) * 1000;
    return performance.now() + (time - this.#context.currentTime + (this.#context.outputLatency || 0)) * 1000;
  }
}
