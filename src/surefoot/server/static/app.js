// The chat page: one conversation over POST v1/chat/completions, and what GET stats tells of the server.
// Text of the model only ever goes into text nodes.
"use strict";

const byId = (id) => document.getElementById(id);
const ORIGINS = ["mtp", "ngram", "bonus", "replaced", "plain"];
const POLL_MS = 1000;
const MOST_SPANS = 20000; // of a page: what is older loses its colours, not its text

const talk = byId("talk");
const message = byId("message");
let messages = []; // what has been said, as the API takes it
let running = null; // the AbortController of the answer that is under way

// --- what the page shows ---------------------------------------------------------------------------------------

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function addTurn(who) {
  const turn = element("article", "turn");
  const text = element("div", "text");
  turn.append(element("h2", "", who), text);
  talk.append(turn);
  return text;
}

function atBottom() {
  return talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
}

function keepAtBottom(change) {
  const follow = atBottom();
  change();
  if (follow) talk.scrollTop = talk.scrollHeight;
}

/** Not on a phone, where that would raise its keyboard. */
function focusMessage() {
  if (matchMedia("(pointer: fine)").matches) message.focus();
}

function say(text) {
  byId("status").textContent = text;
}

function complain(text) {
  byId("problem").textContent = text;
}

function setRunning(controller) {
  running = controller;
  byId("send").disabled = controller !== null;
  byId("stop").disabled = controller === null;
  byId("clear").disabled = controller !== null;
}

/** One answer as it comes: its coloured text, its counts, its speed. */
class Answer {
  constructor() {
    this.target = addTurn("Model");
    this.content = "";
    this.reasoning = "";
    this.tokens = 0;
    this.counts = {};
    this.first = null;
    this.last = null;
    this.thinking = false;
    this.usage = null;
    this.finish = null;
    this.waiting = []; // pieces that the next frame shows
    this.frame = null;
    this.showCounts();
  }

  /** A chunk of the stream. Throws what the server says went wrong. */
  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message || "the server failed");
    if (chunk.usage) this.usage = chunk.usage;
    const choice = (chunk.choices || [])[0];
    if (!choice) return;
    if (choice.finish_reason) this.finish = choice.finish_reason;
    const delta = choice.delta || {};
    this.content += delta.content || "";
    this.reasoning += delta.reasoning_content || "";
    if (delta.reasoning_content) this.thinking = true;
    if (delta.content) this.thinking = false;
    const plain = (delta.reasoning_content || "") + (delta.content || "");
    const pieces = chunk.surefoot || (plain ? [[plain, "plain"]] : []);
    if (!pieces.length) return;
    this.last = performance.now();
    this.first = this.first === null ? this.last : this.first;
    for (const [text, origin] of pieces) {
      const kind = ORIGINS.includes(origin) ? origin : "other";
      const span = element("span", this.thinking ? `${kind} thought` : kind, text);
      span.title = origin;
      this.waiting.push(span);
      this.tokens += 1;
      this.counts[kind] = (this.counts[kind] || 0) + 1;
    }
    this.frame = this.frame || requestAnimationFrame(() => this.show());
  }

  /** What has come, at most once a frame: a quick model sends several chunks in that time. */
  show() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    keepAtBottom(() => this.target.append(...this.waiting));
    this.waiting = [];
    this.showCounts();
    byId("own-speed").textContent = this.speed();
  }

  showCounts() {
    for (const place of document.querySelectorAll("[data-count]")) {
      place.textContent = this.counts[place.dataset.count] || 0;
    }
    byId("other-row").hidden = !this.counts.other;
  }

  /** Tokens a second since the first ones came. */
  speed() {
    const seconds = this.first === null ? 0 : (this.last - this.first) / 1000;
    return seconds > 0 ? `${(this.tokens / seconds).toFixed(1)} tokens/s` : "–";
  }

  /** How it ended, in a sentence. */
  summary(stopped) {
    const tokens = this.usage ? this.usage.completion_tokens : this.tokens;
    const details = (this.usage && this.usage.completion_tokens_details) || {};
    const how = stopped ? "Stopped" : this.finish === "length" ? "Cut at the most tokens" : "Finished";
    const drafts = details.drafted_tokens ? `, ${details.accepted_tokens} of ${details.drafted_tokens} drafts kept` : "";
    return `${how}: ${tokens} tokens, ${this.speed()}${drafts}`;
  }
}

/** Old answers become plain text once there are very many coloured tokens, so that the page stays quick. */
function thinOut() {
  let spans = talk.getElementsByTagName("span").length;
  for (const text of talk.querySelectorAll(".text")) {
    if (spans <= MOST_SPANS) return;
    spans -= text.childElementCount;
    text.textContent = text.textContent;
  }
}

// --- asking the server -----------------------------------------------------------------------------------------

function headers(more) {
  const key = byId("key").value;
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

/** What the settings say; fields left empty are the server's to choose. */
function settings() {
  const chosen = {};
  const fields = [
    ["temperature", "temperature"], ["seed", "seed"], ["max_tokens", "max-tokens"], ["draft_length", "draft-length"],
  ];
  for (const [name, id] of fields) {
    if (byId(id).value !== "") chosen[name] = Number(byId(id).value);
  }
  if (byId("drafter").value) chosen.drafter = byId("drafter").value;
  if (chosen.drafter === "none") delete chosen.draft_length;
  return chosen;
}

/** The JSON of each event of a stream. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

async function refusal(response) {
  const body = await response.json().catch(() => ({}));
  const said = body.error && body.error.message;
  return said || `the server answered ${response.status} ${response.statusText}`;
}

async function ask(text) {
  const controller = new AbortController();
  setRunning(controller);
  complain("");
  say("Answering …");
  const asked = { role: "user", content: text };
  const turn = addTurn("You");
  turn.textContent = text;
  const answer = new Answer();
  talk.scrollTop = talk.scrollHeight;
  let stopped = false;
  try {
    const body = { messages: [...messages, asked], stream: true, stream_options: { include_usage: true }, ...settings() };
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers({ "Content-Type": "application/json" }),
      body: JSON.stringify(body),
      signal: controller.signal,
    });
    if (!response.ok) throw new Error(await refusal(response));
    for await (const chunk of events(response.body)) answer.take(chunk);
    if (answer.finish === null) throw new Error("the answer broke off");
  } catch (error) {
    stopped = controller.signal.aborted;
    if (!stopped) complain(`Error: ${error.message}`);
  }
  answer.show();
  if (answer.tokens || answer.finish) {
    const thought = answer.reasoning ? { reasoning_content: answer.reasoning } : {};
    messages.push(asked, { role: "assistant", content: answer.content, ...thought });
    byId("spoken").textContent = answer.content;
    say(answer.summary(stopped));
  } else { // nothing came: as if it had not been said
    turn.parentElement.remove();
    answer.target.parentElement.remove();
    message.value = message.value || text;
    say(stopped ? "Stopped" : "");
  }
  thinOut();
  setRunning(null);
  focusMessage();
}

// --- the server's numbers --------------------------------------------------------------------------------------

function showStats(stats) {
  byId("model").textContent = stats.model || "";
  byId("server-speed").textContent = `${Number(stats.tokens_per_second).toFixed(1)} tokens/s`;
  byId("slots").textContent = `${stats.running} of ${stats.slots}`;
  byId("queue").textContent = `${stats.queued}`;
  const list = byId("acceptance");
  const proposed = stats.proposed_by_position || [];
  byId("no-drafts").hidden = proposed.length > 0;
  while (list.childElementCount > proposed.length) list.lastChild.remove();
  proposed.forEach((count, place) => {
    if (!list.children[place]) {
      const bar = element("div", "bar");
      bar.append(element("div"));
      const row = element("li");
      row.append(element("span"), bar);
      list.append(row);
    }
    const accepted = stats.accepted_by_position[place];
    const share = count ? (100 * accepted) / count : 0;
    const [text, bar] = list.children[place].children;
    text.textContent = `${share.toFixed(0)} % (${accepted} of ${count})`;
    bar.firstChild.style.width = `${share}%`;
  });
}

async function poll() {
  try {
    const response = document.hidden ? null : await fetch("stats", { headers: headers({}) });
    if (response && response.ok) showStats(await response.json());
  } catch {
    byId("server-speed").textContent = "not reachable";
  }
  setTimeout(poll, POLL_MS);
}

// --- what the user does ----------------------------------------------------------------------------------------

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = message.value;
  if (running || !text.trim()) return;
  const wrong = [...document.querySelectorAll("#settings input")].find((input) => !input.checkValidity());
  if (wrong) {
    byId("settings").open = true;
    wrong.reportValidity();
    return;
  }
  message.value = "";
  ask(text);
});

message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("form").requestSubmit();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});

byId("stop").addEventListener("click", () => running && running.abort());

byId("clear").addEventListener("click", () => {
  messages = [];
  talk.replaceChildren();
  byId("spoken").textContent = "";
  complain("");
  say("");
  focusMessage();
});

if (matchMedia("(max-width: 52rem)").matches) byId("settings").open = false;
focusMessage();
poll();
