// Runs beside the page: plays items of sound one after another without gaps, and counts what was truly played.

const LEVEL_EVERY = 1200; // samples: 50 ms

class Player extends AudioWorkletProcessor {
  constructor() {
    super();
    this.items = []; // {id, pieces, at, played, ended}
    this.levelled = this.squares = 0;
    this.port.onmessage = ({ data }) => this[data.do](data);
  }

  add({ id, samples }) {
    this.item(id).pieces.push(samples);
  }

  end({ id }) {
    const item = this.items.find((each) => each.id === id);
    if (item) item.ended = true;
  }

  stop() {
    const stopped = this.items.map(({ id, played }) => ({ id, played }));
    this.items = [];
    this.port.postMessage({ told: "stopped", stopped });
  }

  item(id) {
    let item = this.items.find((each) => each.id === id);
    if (!item) this.items.push((item = { id, pieces: [], at: 0, played: 0, ended: false }));
    return item;
  }

  process(_, [[output]]) {
    let filled = 0;
    while (filled < output.length && this.items.length) {
      const [item] = this.items, [piece] = item.pieces;
      if (!piece) {
        if (!item.ended) break; // the rest is late: silence meanwhile
        this.items.shift();
        this.port.postMessage({ told: "ended", id: item.id, played: item.played });
        continue;
      }
      if (!item.played) this.port.postMessage({ told: "started", id: item.id, at: currentTime + filled / sampleRate });
      const count = Math.min(output.length - filled, piece.length - item.at);
      output.set(piece.subarray(item.at, item.at + count), filled);
      filled += count;
      item.at += count;
      item.played += count;
      if (item.at === piece.length) {
        item.pieces.shift();
        item.at = 0;
      }
    }
    this.level(output);
    return true;
  }

  level(output) {
    for (const sample of output) this.squares += sample * sample;
    this.levelled += output.length;
    if (this.levelled < LEVEL_EVERY) return;
    this.port.postMessage({ told: "level", rms: Math.sqrt(this.squares / this.levelled) });
    this.levelled = this.squares = 0;
  }
}

registerProcessor("player", Player);
