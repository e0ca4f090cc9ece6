// The small window that says how a number is repeated.

/** Opens it; it closes by Escape, and the keyboard returns to where it was. */
function showCommand(title, { note = "", command = "" }) {
  byId("command-title").textContent = title;
  byId("command-note").textContent = note;
  byId("command-note").hidden = !note;
  byId("command-text").textContent = command;
  byId("command-repeat").hidden = !command;
  byId("command-copy").hidden = !command;
  byId("command-copied").textContent = "";
  byId("command").showModal();
  byId(command ? "command-copy" : "command-close").focus();
}

async function copyCommand() {
  const text = byId("command-text");
  try {
    await navigator.clipboard.writeText(text.textContent);
    byId("command-copied").textContent = "Copied.";
  } catch {
    // A browser may keep pages from the clipboard: the text is marked, to be copied by hand.
    getSelection().selectAllChildren(text);
    byId("command-copied").textContent = "Marked; copy it by Ctrl+C.";
  }
}

byId("command-copy").addEventListener("click", copyCommand);
byId("command-close").addEventListener("click", () => byId("command").close());
