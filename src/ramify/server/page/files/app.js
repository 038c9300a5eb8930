// The page: reads the server's state every few seconds while somebody looks at it.

import { apiKey, getJson } from "./api.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { watchExplainForm } from "./explain.js";
import { askForKey, watchKeyDialog } from "./key_dialog.js";
import { showRequests } from "./requests.js";
import { bucketSeries } from "./series.js";
import { showSummary } from "./summary.js";
import { TimeCharts } from "./time_charts.js";
import { TreePanel } from "./tree_panel.js";

const INTERVAL_MS = 2000;
const TREE_EVERY = 2; // intervals

const charts = new TimeCharts(byId("charts"));
const tree = new TreePanel();
let ticks = 0;
let timer = null;
let isLooking = false;

async function look({ withTree }) {
  const activity = await getJson("v1/activity");
  const { history, live } = activity;
  byId("model").textContent = activity.model;
  byId("key-button").hidden = activity.is_admin && !apiKey(); // a server without keys
  document.title = `${activity.model} · Ramify`;
  const who = activity.is_admin ? "" : `, as ${activity.tenant}`;
  showStatus(`ramify ${activity.version}${who}`);
  charts.show(history, bucketSeries(history), live);
  showRequests(live);
  showSummary(history, activity.is_admin ? await getJson("v1/cache") : null);
  if (withTree) await tree.refresh();
}

function showStatus(text, isLost = false) {
  const status = byId("status");
  status.classList.toggle("lost", isLost);
  if (status.textContent !== text) status.textContent = text;
}

async function tick() {
  if (isLooking) return;
  isLooking = true;
  clearTimeout(timer);
  try {
    if (!document.hidden) await look({ withTree: ticks % TREE_EVERY === 0 });
    ticks += 1;
  } catch (error) {
    showStatus(error.status ? error.message : "the server does not answer", true);
    if (error.status === 401) {
      byId("key-button").hidden = false;
      if (ticks === 0) askForKey(apiKey() ? "The server does not know this key." : undefined);
      ticks += 1;
    }
  } finally {
    isLooking = false;
    timer = setTimeout(tick, INTERVAL_MS);
  }
}

/** Look again, the tree included. */
function lookNow() {
  if (ticks) ticks = TREE_EVERY;
  tick();
}

// Nothing of what another key has shown stays.
watchKeyDialog(() => location.reload());
watchExplainForm();
new Chat(lookNow);
document.addEventListener("visibilitychange", () => document.hidden || tick());
tick();
