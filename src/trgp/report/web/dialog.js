// The dialog that shows how to repeat a number.

/** Opens the dialog; Escape closes it and the focus returns to where it was. */
function showCommand(title, { note = "", commands = [], value }) {
  const listed = commands.map((index) => report.commands[index]);
  const one = commands.length === 1;
  const does = value === undefined ? "run" : "repeat";
  byId("command-title").textContent = title;
  byId("command-note").textContent = note;
  byId("command-note").hidden = !note;
  byId("command-says").textContent = one ? `This command ${does}s it:` : `These commands ${does} it:`;
  byId("command-text").textContent = listed.join("\n");
  byId("command-repeat").hidden = !commands.length;
  byId("command-copy").hidden = !commands.length;
  byId("command-copied").textContent = "";
  byId("command").showModal();
  byId(commands.length ? "command-copy" : "command-close").focus();
}

async function copyCommand() {
  const text = byId("command-text");
  try {
    await navigator.clipboard.writeText(text.textContent);
    byId("command-copied").textContent = "Copied.";
  } catch {
    // A browser may deny pages the clipboard: select the text, to be copied by hand.
    getSelection().selectAllChildren(text);
    byId("command-copied").textContent = "Selected; copy it with Ctrl+C.";
  }
}

byId("command-copy").addEventListener("click", copyCommand);
byId("command-close").addEventListener("click", () => byId("command").close());
