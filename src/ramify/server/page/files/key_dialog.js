// The dialog that asks for an API key.

import { apiKey, setApiKey } from "./api.js";
import { byId } from "./dom.js";

/** Wire the dialog; `onChange` is called when another key is to be used. */
export function watchKeyDialog(onChange) {
  byId("key-button").addEventListener("click", () => askForKey());
  byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setApiKey(byId("key-input").value.trim());
    byId("key-dialog").close();
    onChange();
  });
}

const REASON = byId("key-reason").textContent;

/** Open the dialog, with a reason if there is one. */
export function askForKey(reason = REASON) {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  byId("key-reason").textContent = reason;
  byId("key-input").value = apiKey();
  dialog.showModal();
}
