// Signing in: turns the ticket behind the # into a cookie, then opens the page.
// Owns: that the ticket leaves the address bar before anything else happens. Never: keeps it.

function look() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return;
  history.replaceState(null, "", "/");
  enter(given);
}

addEventListener("hashchange", look);
look();

async function enter(token) {
  const said = document.getElementById("said");
  try {
    const answer = await fetch("/api/session", { method: "POST", body: JSON.stringify({ token }) });
    if (answer.ok) return location.replace("/");
    said.textContent = "This link was used before, is too old, or belongs to another home. For a new one, run";
  } catch {
    said.textContent = "The server does not answer. Start it again:";
  }
}
