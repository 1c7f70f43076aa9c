// A microphone of a program: it hears speech when it is told to and silence else, in real time, mono PCM16.

import { readFileSync } from 'node:fs';

export const RATE_HZ = 24_000; // of the WAV files
const HEADER_BYTES = 44;
const PIECE_MS = 100;
const PIECE_BYTES = (2 * RATE_HZ * PIECE_MS) / 1000;

export class Microphone {
  // directory: has first.wav, second.wav and third.wav; hear: is given each piece.
  constructor(directory, hear) {
    this.directory = directory;
    this.speech = [];
    const begun = performance.now();
    let told = 0;
    this.timer = setInterval(() => {
      for (; (told + 1) * PIECE_MS <= performance.now() - begun; told++) {
        hear(this.speech.shift() ?? Buffer.alloc(PIECE_BYTES));
      }
    }, PIECE_MS / 4);
  }

  say(name) {
    const sound = readFileSync(`${this.directory}/${name}.wav`).subarray(HEADER_BYTES);
    for (let begin = 0; begin < sound.length; begin += PIECE_BYTES) {
      const piece = Buffer.alloc(PIECE_BYTES);
      sound.copy(piece, 0, begin, begin + PIECE_BYTES);
      this.speech.push(piece);
    }
  }

  close() {
    clearInterval(this.timer);
  }
}
