// A conversation by the OpenAI Agents SDK for Node: node agents_talk.mjs BASE_URL DIRECTORY. See README.md.

import { RealtimeAgent, RealtimeSession, tool } from '@openai/agents-realtime';
import { z } from 'zod';
import { Microphone } from './microphone.mjs';

const [baseURL, directory] = process.argv.slice(2);
const report = { calls: [], interrupted: [], truncated_ms: [], transcripts: [], errors: [] };

const lamp = tool({
  name: 'lamp',
  description: 'Turns the lamp on or off.',
  parameters: z.object({ on: z.boolean() }),
  execute: async ({ on }) => {
    report.calls.push({ on });
    session.transport.updateSessionConfig({ toolChoice: 'none' });
    return 'done';
  },
});
const agent = new RealtimeAgent({ name: 'housekeeper', instructions: 'Be brief.', tools: [lamp] });
const session = new RealtimeSession(agent, { transport: 'websocket', config: { toolChoice: 'required' } });
let heard = false;
let interrupted = false;

session.on('audio', () => {
  if (!heard) microphone.say('second');
  heard = true;
});

session.on('audio_interrupted', () => {
  interrupted = true;
});

session.on('error', ({ error }) => report.errors.push(JSON.stringify(error)));

session.on('transport_event', (event) => {
  if (event.type === 'conversation.item.truncated') report.truncated_ms.push(event.audio_end_ms);
  if (event.type === 'conversation.item.input_audio_transcription.completed') {
    report.transcripts.push(event.transcript);
    look();
  }
});

session.on('audio_start', () => {
  interrupted = false;
});

session.on('agent_end', () => {
  if (!heard) return; // the call
  report.interrupted.push(interrupted);
  if (report.interrupted.length === 2) microphone.say('third');
  look();
});

session.transport.on('connection_change', (status) => {
  if (status !== 'disconnected') return;
  microphone.close();
  if (report.interrupted.length < 3) report.errors.push('the server has closed');
  console.log(JSON.stringify(report));
});

function look() {
  if (report.interrupted.length < 3 || !report.transcripts.length) return;
  setImmediate(() => session.close()); // the session has yet to do its own part about this event
}

const url = `${baseURL.replace('http', 'ws')}/realtime?model=gpt-realtime`;
await session.connect({ apiKey: process.env.OPENAI_API_KEY, url });
const microphone = new Microphone(directory, (piece) =>
  session.sendAudio(piece.buffer.slice(piece.byteOffset, piece.byteOffset + piece.length)),
);
microphone.say('first');
