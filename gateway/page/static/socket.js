// The WebSocket /v1/realtime.

import { Problem, post } from "./api.js";
import { storedKey } from "./key.js";

// Opens a session: `onEvent` gets each event of the server, `onClose` a reason if it was not `close` here that ended it.
export async function openSocket(onEvent, onClose) {
  const protocols = ["realtime"];
  if (storedKey()) protocols.push(`openai-insecure-api-key.${await clientSecret()}`);
  const url = new URL("/v1/realtime", location.href);
  url.protocol = url.protocol.replace("http", "ws");
  const socket = new WebSocket(url, protocols);
  await opened(socket);
  let wanted = false;
  socket.onmessage = ({ data }) => onEvent(JSON.parse(data));
  socket.onclose = ({ code }) => onClose(wanted ? null : WHY[code] ?? `The connection was lost (${code}). What was said is kept: go on when you like.`);
  return {
    send: (type, members = {}) => socket.send(JSON.stringify({ type, ...members })),
    close: () => {
      wanted = true;
      socket.close();
    },
  };
}

const WHY = {
  1001: "The server ended the session. What was said is kept: go on when you like.",
  1013: "The server has no room for another conversation now. Try again in a while.",
};

// A key of ten minutes: the API key itself is not in the WebSocket's headers.
async function clientSecret() {
  return (await (await post("/v1/realtime/client_secrets", {})).json()).value;
}

function opened(socket) {
  return new Promise((resolve, reject) => {
    socket.onopen = resolve;
    socket.onclose = socket.onerror = () => reject(new Problem("The server took no conversation on. See whether it still runs, and try again."));
  });
}
