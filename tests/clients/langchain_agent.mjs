// An agent by LangChain.js: node langchain_agent.mjs BASE_URL MODEL. See README.md.
import { ChatOpenAI } from '@langchain/openai';
import { createAgent, tool } from 'langchain';
import * as z from 'zod';

const [baseURL, model] = process.argv.slice(2);
const report = [];

for (const useResponsesApi of [false, true])
  for (const streamed of [false, true]) {
    const calls = [];
    const texts = [];
    const lamp = tool(
      (given) => {
        calls.push(given);
        return 'done';
      },
      {
        name: 'lamp',
        description: 'Turns a lamp on or off.',
        schema: z.object({ room: z.enum(['hall', 'attic']), on: z.boolean() }),
      },
    );
    const chat = new ChatOpenAI({ model, configuration: { baseURL }, useResponsesApi });
    const agent = createAgent({ model: chat, tools: [lamp], systemPrompt: 'Be brief.' });
    let messages = [];
    for (const content of ['Light, please.', 'Everywhere.', 'Thanks.']) {
      const input = { messages: [...messages, { role: 'user', content }] };
      if (streamed) {
        let text = '';
        for await (const [mode, told] of await agent.stream(input, { streamMode: ['messages', 'values'] }))
          if (mode === 'values') messages = told.messages;
          else if (told[0].type === 'ai') text += told[0].text;
        texts.push(text);
      } else {
        messages = (await agent.invoke(input)).messages;
        texts.push(messages.at(-1).text);
      }
    }
    report.push({ calls, texts });
  }
console.log(JSON.stringify(report));
