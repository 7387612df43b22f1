//! A browser that a test drives: Chromium, through its driver.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

/// The time limit of each step. A browser takes long on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);

/// One answer over HTTP: its status, its headers as text, its body.
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

/// Sends a request to `address`, on a connection of its own.
pub fn exchange(address: &str, head: &str, body: &str) -> std::io::Result<Answer> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let length = body.len();
    let request = format!("{head}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}");
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    // The driver may keep the connection open, so that the length decides.
    let mut piece = [0; 4096];
    loop {
        let text = String::from_utf8_lossy(&answer);
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let lower = head.to_lowercase();
            let length = lower.split("content-length:").nth(1);
            let length = length.and_then(|rest| rest.lines().next()?.trim().parse().ok());
            if length.is_some_and(|length: usize| body.len() >= length) {
                break;
            }
        }
        match stream.read(&mut piece)? {
            0 => break,
            count => answer.extend_from_slice(&piece[..count]),
        }
    }
    let text = String::from_utf8_lossy(&answer).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split(' ').nth(1).and_then(|it| it.parse().ok()).unwrap_or(0);
    Ok(Answer { status, head: head.to_owned(), body: body.to_owned() })
}

/// A window of a browser.
pub struct Browser {
    driver: Child,
    address: String,
    session: String,
    profile: TempDir,
}

impl Browser {
    /// Starts a browser; `None` if this machine has none, or none starts on it.
    pub fn start() -> Option<Self> {
        let has = |name: &str| Path::new(name).exists();
        if !has("/usr/bin/chromedriver") || !has("/usr/bin/chromium") {
            eprintln!("skipped: chromium and chromium-driver are not installed");
            return None;
        }
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let driver = Command::new("/usr/bin/chromedriver")
            .arg(format!("--port={port}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let profile = tempfile::tempdir().unwrap();
        let address = format!("127.0.0.1:{port}");
        let mut browser = Self { driver, address, session: String::new(), profile };
        let begun = Instant::now();
        while TcpStream::connect(&browser.address).is_err() {
            assert!(begun.elapsed() < PATIENCE, "the driver does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        let data = format!("--user-data-dir={}", browser.profile.path().display());
        let arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            &data,
        ];
        let options = json!({ "binary": "/usr/bin/chromium", "args": arguments });
        let wanted = json!({ "capabilities": { "alwaysMatch": {
            "browserName": "chrome", "goog:chromeOptions": options,
            "goog:loggingPrefs": { "browser": "ALL" } } } });
        let head = format!("POST /session HTTP/1.1\r\nHost: {}", browser.address);
        let made = exchange(&browser.address, &head, &wanted.to_string()).ok();
        let made = made.filter(|answer| answer.status == 200);
        let Some(made) = made.and_then(|answer| serde_json::from_str::<Value>(&answer.body).ok())
        else {
            eprintln!("skipped: chromium does not start");
            return None;
        };
        made["value"]["sessionId"].as_str()?.clone_into(&mut browser.session);
        Some(browser)
    }

    fn send(&self, method: &str, path: &str, body: Option<&Value>) -> Value {
        let text = body.map(Value::to_string).unwrap_or_default();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: {}", self.address);
        let answer = exchange(&self.address, &head, &text).unwrap();
        let value: Value = serde_json::from_str(&answer.body).unwrap_or_default();
        assert_eq!(answer.status, 200, "{method} {path}: {}", answer.body);
        value["value"].clone()
    }

    fn session(&self, method: &str, path: &str, body: Option<&Value>) -> Value {
        self.send(method, &format!("/session/{}{path}", self.session), body)
    }

    pub fn open(&self, url: &str) {
        self.session("POST", "/url", Some(&json!({ "url": url })));
    }

    pub fn size(&self, width: u32, height: u32) {
        let metrics = json!({ "cmd": "Emulation.setDeviceMetricsOverride", "params": {
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600 } });
        self.session("POST", "/goog/cdp/execute", Some(&metrics));
    }

    /// Whether dark pages are preferred.
    pub fn prefer_dark(&self, is_dark: bool) {
        let value = if is_dark { "dark" } else { "light" };
        let media = json!({ "cmd": "Emulation.setEmulatedMedia", "params": {
            "features": [{ "name": "prefers-color-scheme", "value": value }] } });
        self.session("POST", "/goog/cdp/execute", Some(&media));
    }

    /// The result of an expression in the page.
    pub fn value(&self, expression: &str) -> Value {
        let script = json!({ "script": format!("return ({expression});"), "args": [] });
        self.session("POST", "/execute/sync", Some(&script))
    }

    /// Waits until an expression in the page is true.
    pub fn until(&self, expression: &str) {
        let begun = Instant::now();
        while self.value(expression) != Value::Bool(true) {
            if begun.elapsed() > PATIENCE {
                let text = self.value("document.body.innerText");
                panic!("never: {expression}\n{}\n{:?}", text.as_str().unwrap_or(""), self.log());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Presses a key in the element that has the focus.
    pub fn press(&self, key: &str) {
        let action = |kind: &str| json!({ "type": kind, "value": key });
        let actions = json!({ "actions": [{ "type": "key", "id": "keys",
            "actions": [action("keyDown"), action("keyUp")] }] });
        self.session("POST", "/actions", Some(&actions));
    }

    /// What the page and the browser have complained about.
    pub fn log(&self) -> Vec<String> {
        let entries = self.session("POST", "/se/log", Some(&json!({ "type": "browser" })));
        let entries = entries.as_array().cloned().unwrap_or_default();
        let severe = entries.into_iter().filter(|entry| entry["level"] == "SEVERE");
        severe.map(|entry| entry["message"].as_str().unwrap_or_default().to_owned()).collect()
    }

    /// Keeps a picture of the window as a product of the build.
    pub fn picture(&self, name: &str) {
        let text = self.session("GET", "/screenshot", None);
        let text = text.as_str().expect("a picture");
        let bytes = openssl::base64::decode_block(text).expect("base64");
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("pictures");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(format!("{name}.png")), bytes).unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let head = format!("DELETE /session/{} HTTP/1.1\r\nHost: x", self.session);
        let _ = exchange(&self.address, &head, "");
        let _ = self.driver.kill();
        let _ = self.driver.wait();
        // The browser is no child of this process.
        let profile = self.profile.path().display().to_string();
        let _ = Command::new("pkill").args(["-9", "-f", &profile]).status();
    }
}
