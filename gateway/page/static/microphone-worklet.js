// Runs beside the page: makes PCM16 of 24 kHz of what the microphone gives, 40 ms at a time.

const RATE_HZ = 24_000, CHUNK = 960;

class Microphone extends AudioWorkletProcessor {
  constructor() {
    super();
    this.chunk = new Int16Array(CHUNK);
    this.filled = 0;
    this.step = sampleRate / RATE_HZ; // input samples for one of ours
    this.left = this.step; // of which so many are missing
    this.sum = 0;
    this.squares = 0;
  }

  process([[samples]]) {
    for (const sample of samples ?? []) this.take(sample);
    return true;
  }

  // Each of our samples is the mean of the input in its time: plain, and at 24 kHz the input itself.
  take(sample) {
    let weight = 1;
    while (weight >= this.left) {
      this.put((this.sum + sample * this.left) / this.step);
      weight -= this.left;
      this.left = this.step;
      this.sum = 0;
      if (weight < 1e-9) return;
    }
    this.sum += sample * weight;
    this.left -= weight;
  }

  put(value) {
    const sample = Math.max(-1, Math.min(1, value));
    this.squares += sample * sample;
    this.chunk[this.filled++] = Math.round(sample * 32767);
    if (this.filled < CHUNK) return;
    const rms = Math.sqrt(this.squares / CHUNK);
    this.port.postMessage({ pcm: this.chunk.buffer, rms }, [this.chunk.buffer]);
    this.chunk = new Int16Array(CHUNK);
    this.filled = this.squares = 0;
  }
}

registerProcessor("microphone", Microphone);
