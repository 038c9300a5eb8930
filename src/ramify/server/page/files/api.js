// Calls of the server's public endpoints, with the key of this tab.

const STORED_KEY = "ramify-key";

/** An answer that is no success: its status, and the server's message. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function apiKey() {
  return sessionStorage.getItem(STORED_KEY) ?? "";
}

export function setApiKey(key) {
  if (key) sessionStorage.setItem(STORED_KEY, key);
  else sessionStorage.removeItem(STORED_KEY);
}

/** The response to a request; `body` is sent as JSON, or as it is if it is a string. */
export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  const options = { headers, signal, cache: "no-store" };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    options.method = "POST";
    options.body = typeof body === "string" ? body : JSON.stringify(body);
  }
  const response = await fetch(path, options);
  if (!response.ok) throw new ApiError(response.status, await errorMessage(response));
  return response;
}

/** The JSON of an answer. */
export async function getJson(path, options) {
  return (await request(path, options)).json();
}

async function errorMessage(response) {
  try {
    const { error } = await response.json();
    return error.message;
  } catch {
    return `the server answers ${response.status}`;
  }
}
