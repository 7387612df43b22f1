//! `fathom web`: who may look, what the page shows in a real browser, and that no text of others is
//! run in it.

mod browser;
mod many;
mod pagers;

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::nbd::Nbd;
use crate::process::{Daemon, command, disk_over_nbd, image, kill};
use crate::store;
use browser::{Browser, exchange};

const TOKEN: &str = "0123456789abcdef";

/// A running `fathom web`.
struct Page {
    child: Child,
    /// As it was printed.
    invitation: String,
}

impl Page {
    fn start(folder: &Path, arguments: &[&str]) -> Self {
        Self::start_by(command(folder), arguments)
    }

    fn start_by(mut command: Command, arguments: &[&str]) -> Self {
        let mut child = command.arg("web").args(arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let invitation = line.trim().strip_prefix("The page is at ").expect(&line).to_owned();
        Self { child, invitation }
    }

    /// One for a daemon, with the token of the tests.
    fn of(daemon: &Daemon) -> Self {
        std::fs::write(daemon.path("token"), TOKEN).unwrap();
        let arguments =
            ["--listen", "127.0.0.1:0", "--host", "here=control.sock", "--token-file", "token"];
        Self::start(daemon.path("").as_path(), &arguments)
    }

    fn address(&self) -> &str {
        let rest = self.invitation.split("://").nth(1).unwrap();
        rest.split('/').next().unwrap()
    }

    fn port(&self) -> &str {
        self.address().rsplit(':').next().unwrap()
    }

    /// Requests a path, with further lines of the head.
    fn get(&self, path: &str, more: &str) -> browser::Answer {
        let head = format!("GET {path} HTTP/1.1\r\nHost: {}{more}", self.address());
        exchange(self.address(), &head, "").unwrap()
    }

    fn cookie(&self) -> String {
        format!("\r\nCookie: fathom-{}={TOKEN}", self.port())
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        kill(&self.child, libc::SIGTERM);
        let status = self.child.wait().unwrap();
        assert!(status.success() || std::thread::panicking(), "{status}");
    }
}

fn daemon() -> Daemon {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), "a.img", 16 << 20);
    let more = "vm = \"web\"\nlayers = [{ kind = \"cache\", size = \"4M\" }]\n";
    let configuration = disk_over_nbd(&folder.path().join("a.img"), more);
    Daemon::start_in(folder, &configuration)
}

#[test]
fn only_who_has_the_token_may_look() {
    let daemon = daemon();
    let page = Page::of(&daemon);
    assert!(page.invitation.ends_with(&format!("/?token={TOKEN}")));
    let first = page.get("/", "");
    assert!(first.status == 303 && first.head.contains("location: /login"), "{}", first.head);
    for path in ["/api/hosts", "/api/here/v1/disks", "/api/here/live", "/?token=wrong"] {
        let refused = page.get(path, "").status;
        assert!(refused == 401 || refused == 303, "{path}: {refused}");
    }
    let welcome = page.get(&format!("/?token={TOKEN}"), "");
    let cookie = "HttpOnly; SameSite=Strict";
    assert!(welcome.status == 303 && welcome.head.contains(cookie), "{}", welcome.head);
    let login = |token: &str| {
        let head = format!("POST /login HTTP/1.1\r\nHost: {}", page.address());
        exchange(page.address(), &head, &format!("token={token}")).unwrap().status
    };
    assert_eq!((login(TOKEN), login("0123456789abcdee"), login("")), (303, 403, 403));
    let hosts = page.get("/api/hosts", &page.cookie());
    assert!(hosts.status == 200 && hosts.body.contains("\"here\""), "{}", hosts.body);
    assert!(hosts.head.contains("content-security-policy: default-src 'none'"), "{}", hosts.head);
    let disks = page.get("/api/here/v1/disks", &page.cookie());
    assert!(disks.body.contains("a.img"), "{}", disks.body);
    // What changes something, what is endless, and what does not exist.
    for path in ["shutdown", "recording", "stores/stream", "disks/../shutdown", "disks/%2e%2e/x"] {
        let status = page.get(&format!("/api/here/v1/{path}"), &page.cookie()).status;
        assert!(status == 403, "{path}: {status}");
    }
    assert_eq!(page.get("/api/elsewhere/live", &page.cookie()).status, 404);
    let head =
        format!("POST /api/here/v1/disks HTTP/1.1\r\nHost: {}{}", page.address(), page.cookie());
    assert_eq!(exchange(page.address(), &head, "{}").unwrap().status, 405);
    // The page of somebody else whose name leads here.
    let head = format!("GET /api/hosts HTTP/1.1\r\nHost: evil.example{}", page.cookie());
    assert_eq!(exchange(page.address(), &head, "").unwrap().status, 421);
}

#[test]
fn other_hosts_are_served_with_tls_alone_and_a_socket_is_its_owner_s() {
    let daemon = daemon();
    let folder = daemon.path("");
    let refused = command(&folder).args(["web", "--listen", "0.0.0.0:0"]).output().unwrap();
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && text.contains("--certificate"), "{text}");
    let line = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout w.key \
                -out w.pem -days 2 -subj /CN=localhost";
    let made = Command::new("openssl").current_dir(&folder).args(line.split(' ')).output().unwrap();
    assert!(made.status.success());
    let files = ["--certificate", "w.pem", "--key", "w.key", "--control", "control.sock"];
    let page = Page::start(&folder, &[["--listen", "0.0.0.0:0"].as_slice(), &files].concat());
    let url = format!("https://localhost:{}/", page.port());
    let curl = Command::new("openssl")
        .current_dir(&folder)
        .args(["s_client", "-quiet", "-CAfile", "w.pem", "-connect"])
        .arg(format!("127.0.0.1:{}", page.port()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let mut client = curl.unwrap();
    let request = format!("GET / HTTP/1.1\r\nHost: {url}\r\nConnection: close\r\n\r\n");
    client.stdin.as_mut().unwrap().write_all(request.as_bytes()).unwrap();
    let mut line = String::new();
    BufReader::new(client.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("HTTP/1.1 303"), "{line}");
    let _ = client.kill();
    let _ = client.wait();
    let page = Page::start(&folder, &["--listen", "unix:web.sock", "--control", "control.sock"]);
    let mode = std::fs::metadata(folder.join("web.sock")).unwrap().permissions().mode();
    assert_eq!((mode & 0o777, &*page.invitation), (0o600, "unix:web.sock"));
    drop(page);
    assert!(!folder.join("web.sock").exists());
}

/// A browser with the page of a daemon.
fn look(page: &Page, browser: &Browser, view: &str) {
    browser.open(&page.invitation);
    browser.until("location.pathname === '/' && document.querySelector('#nav a') !== null");
    browser.open(&format!("http://{}/#/here/{view}", page.address()));
}

#[test]
fn a_browser_shows_what_a_disk_does() {
    let Some(browser) = Browser::start() else { return };
    let daemon = daemon();
    let page = Page::of(&daemon);
    browser.size(1400, 1000);
    browser.open(&format!("http://{}/", page.address()));
    browser.until("location.pathname === '/login'");
    browser.value(&format!("void (document.querySelector('#token').value = '{TOKEN}')"));
    browser.value("void document.querySelector('form').submit()");
    browser.until("document.querySelector('tbody a')?.textContent === 'a'");
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    let work = |nbd: &mut Nbd| {
        for block in 0..200 {
            assert_eq!(nbd.fill_block(block, 7), Some(0));
            nbd.read_block(block);
        }
    };
    let shown =
        "[...document.querySelectorAll('.tile b')].some((it) => /^[1-9]/.test(it.textContent))";
    let begun = std::time::Instant::now();
    while browser.value(shown) != serde_json::Value::Bool(true) {
        assert!(begun.elapsed() < crate::process::PATIENCE, "no work is shown");
        work(&mut nbd);
    }
    browser.until("document.querySelector('.u-over') !== null");
    browser.picture("disks-light");
    // The keyboard alone leads to the disk.
    browser.value("void document.querySelector('tbody a').focus()");
    browser.press("\u{e007}");
    browser.until("location.hash === '#/here/disks/a'");
    work(&mut nbd);
    browser.until(
        "document.querySelector('canvas.heat')?.getAttribute('aria-label')?.startsWith('Most of')",
    );
    browser.until("document.querySelector('ol.layers')?.textContent.includes('cache')");
    browser
        .until("document.querySelectorAll('[aria-label=\"Slow requests\"] tbody tr').length > 1");
    browser.prefer_dark(true);
    browser.until("getComputedStyle(document.body).backgroundColor === 'rgb(17, 22, 28)'");
    browser.picture("disk-dark");
    browser.prefer_dark(false);
    // A problem is shown with what to do.
    std::fs::remove_file(daemon.path("a.img")).unwrap();
    let _ = daemon.client().disk("a");
    browser.until("document.querySelector('ul.problems')?.textContent.includes('deleted')");
    for (view, text) in [
        ("guests", "Guests"),
        ("pools", "pool"),
        ("devices", "Devices"),
        ("events", "Events"),
        ("who?by=vm", "Name"),
    ] {
        browser.open(&format!("http://{}/#/here/{view}", page.address()));
        browser.until(&format!("document.querySelector('main').textContent.includes('{text}')"));
    }
    assert_eq!(browser.log(), [""; 0], "what the browser complains about");
}

#[test]
fn a_browser_shows_pools_and_who_has_changed_what() {
    let Some(browser) = Browser::start() else { return };
    let daemon = Daemon::start_in(store::prepared(), store::CONFIGURATION);
    let folder = daemon.path("");
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    nbd.write(0, &(0..1 << 20).map(|_| fastrand::u8(..)).collect::<Vec<_>>());
    store::run(&folder, &["snapshot", "create", "a", "--name", "kept"]).unwrap();
    nbd.write(0, &(0..1 << 20).map(|_| fastrand::u8(..)).collect::<Vec<_>>());
    let page = Page::of(&daemon);
    browser.size(1400, 1200);
    look(&page, &browser, "pools");
    browser
        .until("document.querySelector('main').textContent.includes('fathom store reclaimable')");
    store::run(&folder, &["store", "check", "pool"]).unwrap();
    store::run(&folder, &["store", "reclaimable", "pool"]).unwrap();
    let shown = "document.querySelector('main').textContent";
    browser.until(&format!("/Verified .*: nothing is damaged/.test({shown})"));
    let frees = "[aria-label=\"What deletions would free\"] tbody tr";
    let line = format!("[...document.querySelectorAll('{frees}')].map((it) => it.textContent)");
    browser.until(&format!("{line}.some((it) => /^onekept1(\\.\\d+)?M$/.test(it))"));
    browser.picture("pools");
    // A name that is markup, in a request that is refused.
    let script = "<img src=x onerror=\"window.hacked=1\">";
    let refused = store::run(&folder, &["store", "new", "pool", script, "1M"]);
    assert!(refused.is_err());
    browser.open(&format!("http://{}/#/here/changes", page.address()));
    browser.until(&format!("{shown}.includes('onerror')"));
    assert_eq!(browser.value("window.hacked ?? null"), serde_json::Value::Null);
    browser.until(&format!("{shown}.includes('\"action\":\"snapshot\"')"));
    browser.value("void (document.querySelector('input[type=search]').value = 'onerror')");
    browser.value(
        "void document.querySelector('input[type=search]').dispatchEvent(new Event('input'))",
    );
    browser.until("document.querySelectorAll('[aria-label=\"Changes\"] tbody tr').length === 1");
    browser.picture("changes");
    browser.open(&format!("http://{}/#/here/guests", page.address()));
    browser.until(&format!("{shown}.includes('No guest is on a vhost-user disk')"));
    assert_eq!(browser.log(), [""; 0], "what the browser complains about");
    drop(nbd);
    daemon.end();
}

#[test]
fn a_query_is_typed_runs_and_ends_with_the_page() {
    let Some(browser) = Browser::start() else { return };
    let daemon = daemon();
    let page = Page::of(&daemon);
    browser.size(1200, 1000);
    look(&page, &browser, "query");
    browser.until("document.querySelector('textarea') !== null");
    let run = |text: &str| {
        browser.value(&format!("void (document.querySelector('textarea').value = {text:?})"));
        browser.value("void document.querySelector('button.main').click()");
    };
    run("select nonsense from nowhere");
    browser.until("document.querySelector('pre.bad')?.textContent.includes('nowhere')");
    run("select IOOp, Size from IOstream where IOOp = 'w'");
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    let rows = "document.querySelectorAll('[aria-label=\"Rows\"] tbody tr').length > 3";
    let begun = std::time::Instant::now();
    while browser.value(rows) != serde_json::Value::Bool(true) {
        assert!(
            begun.elapsed() < crate::process::PATIENCE,
            "no row: {:?}",
            browser.value("document.body.innerText")
        );
        assert_eq!(nbd.fill_block(3, 7), Some(0));
    }
    browser.picture("query");
    // The thread that has started a process is its parent.
    let running = || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", page.child.id())).unwrap();
        let children =
            |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("children"));
        tasks.flatten().any(|task| children(task).is_ok_and(|it| !it.trim().is_empty()))
    };
    assert!(running());
    browser.open(&format!("http://{}/#/here/events", page.address()));
    daemon.until("the query ends with its reader", || !running());
    // One that runs does not outlive the page.
    look(&page, &browser, "query");
    browser.until("document.querySelector('textarea') !== null");
    run("select IOOp, Size from IOstream where IOOp = 'z'");
    daemon.until("a query runs", running);
}
