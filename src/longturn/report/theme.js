// The button between light and dark; until it is used the system's choice stands.
(() => {
  const theme = document.getElementById("theme");
  const root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const label = () => { theme.textContent = dark() ? "Light theme" : "Dark theme"; };
  theme.hidden = false;
  theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; label(); });
  label();
})();
