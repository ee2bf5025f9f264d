// On a served page only: asks whether the results have changed, and offers to reload. Reloading unasked would lose a zoom.
(() => {
  const stamp = document.getElementById("data").dataset.stamp;
  const news = document.getElementById("news");
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "New results: reload";
  button.addEventListener("click", () => location.reload());
  async function ask() {
    try {
      const answer = await fetch("stamp", { cache: "no-store" });
      if (answer.ok && (await answer.text()) !== stamp) news.replaceChildren(button);
    } catch {
      news.textContent = "The server of this page is gone.";
    }
    setTimeout(ask, 3000);
  }
  setTimeout(ask, 3000);
})();
