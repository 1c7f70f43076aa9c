// The API key: asked for when the server wants one, kept in this tab's session storage only.

import { byId } from "./dom.js";

const NAME = "quartet-api-key";
let asking = null;

export const storedKey = () => sessionStorage.getItem(NAME) ?? "";

// Asks for a key, unless another has been given since `used` was sent. Rejects if the user gives none.
export function askForKey(reason, used = storedKey()) {
  if (storedKey() !== used) return Promise.resolve();
  asking ??= ask(reason).finally(() => (asking = null));
  return asking;
}

function ask(reason) {
  const dialog = byId("key-dialog"), field = byId("key");
  byId("change-key").hidden = false;
  byId("key-reason").textContent = reason;
  dialog.returnValue = "";
  dialog.showModal();
  field.focus();
  byId("key-cancel").onclick = () => dialog.close();
  return new Promise((resolve, reject) => {
    dialog.onclose = () => {
      const given = field.value.trim();
      field.value = "";
      if (dialog.returnValue !== "use" || !given) {
        reject(new Error('This server wants an API key. Press "API key" above to enter one.'));
        return;
      }
      sessionStorage.setItem(NAME, given);
      resolve();
    };
  });
}
