//! A browser without a screen, driven over the pipe of its own protocol (Chrome DevTools Protocol:
//! one JSON object after the other, each with a zero byte behind it).

use super::{PATIENCE, wait};
use ringway_testkit::skip::{Need, skip};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::pipe::{PipeFlags, pipe_with};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Chromium with one page; dropping it ends it.
pub(crate) struct Browser {
    child: Child,
    orders: File,
    answers: Receiver<Value>,
    /// The page; empty before there is one.
    session: String,
    number: u64,
    /// What it told by itself.
    pub(crate) events: Vec<Value>,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Starts it; leaves the test out if this machine has none.
    pub(crate) fn start() -> Option<Self> {
        let has = Command::new("chromium").arg("--version").output();
        if let Err(error) = has {
            skip(Need::Chromium, format!("chromium: {error}"));
            return None;
        }
        let profile = tempfile::tempdir().unwrap();
        // It reads orders from descriptor 3 and answers on 4.
        let (order_out, order_in) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let (answer_out, answer_in) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let high = |fd: OwnedFd| fcntl_dupfd_cloexec(fd, 10).unwrap();
        let (theirs_in, theirs_out) = (high(order_out), high(answer_in));
        let mut command = Command::new("chromium");
        command
            // The tests may run as root; the only page is ours.
            .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"])
            .args(["--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let fds = [(theirs_in.as_raw_fd(), 3), (theirs_out.as_raw_fd(), 4)];
        // SAFETY: dup2 may be called between fork and exec; both are open and neither is 3 or 4.
        unsafe {
            command.pre_exec(move || {
                for (from, to) in fds {
                    if libc::dup2(from, to) < 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        let child = command.spawn().expect("it starts");
        drop((theirs_in, theirs_out));
        let (tell, answers) = channel();
        std::thread::spawn(move || {
            let mut reader = BufReader::new(File::from(answer_out));
            let mut message = Vec::new();
            while reader.read_until(0, &mut message).is_ok_and(|count| count > 0) {
                message.pop();
                let Ok(value) = serde_json::from_slice(&message) else { return };
                if tell.send(value).is_err() {
                    return;
                }
                message.clear();
            }
        });
        let (orders, session) = (File::from(order_in), String::new());
        let (number, events) = (0, Vec::new());
        let mut browser =
            Self { child, orders, answers, session, number, events, _profile: profile };
        browser.attach();
        Some(browser)
    }

    fn attach(&mut self) {
        let targets = self.order("Target.getTargets", json!({}));
        let all = targets["targetInfos"].as_array().unwrap();
        let page = all.iter().find(|target| target["type"] == "page").unwrap();
        let page = json!({ "targetId": page["targetId"], "flatten": true });
        let session = self.order("Target.attachToTarget", page);
        self.session = session["sessionId"].as_str().unwrap().to_owned();
        for domain in ["Page", "Runtime", "Log", "Network"] {
            self.order(&format!("{domain}.enable"), json!({}));
        }
    }

    /// Has it do something: the result.
    #[track_caller]
    pub(crate) fn order(&mut self, method: &str, params: Value) -> Value {
        self.number += 1;
        let mut message = json!({ "id": self.number, "method": method, "params": params });
        if !self.session.is_empty() {
            message["sessionId"] = self.session.clone().into();
        }
        let mut bytes = serde_json::to_vec(&message).unwrap();
        bytes.push(0);
        self.orders.write_all(&bytes).unwrap();
        loop {
            let mut answer = self.answers.recv_timeout(PATIENCE).expect("it answers");
            if answer["id"] == self.number {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].take();
            }
            self.events.push(answer);
        }
    }

    /// Opens an address.
    pub(crate) fn open(&mut self, address: &str) {
        let opened = self.order("Page.navigate", json!({ "url": address }));
        assert!(opened["errorText"].is_null(), "{opened}");
    }

    /// What an expression of the page is.
    #[track_caller]
    pub(crate) fn eval(&mut self, expression: &str) -> Value {
        let params =
            json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let mut result = self.order("Runtime.evaluate", params);
        assert!(result["exceptionDetails"].is_null(), "{expression}: {result}");
        result["result"]["value"].take()
    }

    /// Waits until an expression is true. As long as the page lacks what it names, it is not.
    #[track_caller]
    pub(crate) fn until(&mut self, expression: &str) {
        let expression = &format!("(() => {{ try {{ return {expression} }} catch {{}} }})()");
        let deadline = Instant::now() + PATIENCE;
        while self.eval(expression) != true {
            if Instant::now() > deadline {
                let text = self.eval("document.body?.innerText");
                panic!("never: {expression}\n{text}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Presses a key: one letter, or its name.
    pub(crate) fn press(&mut self, key: &str) {
        let code = match key {
            "Tab" => 9,
            "Escape" => 27,
            "End" => 35,
            "Home" => 36,
            "ArrowLeft" => 37,
            "ArrowUp" => 38,
            "ArrowRight" => 39,
            "ArrowDown" => 40,
            _ => 0,
        };
        let mut params = json!({ "type": "keyDown", "key": key, "windowsVirtualKeyCode": code });
        if key.len() == 1 {
            params["text"] = key.into();
        }
        self.order("Input.dispatchKeyEvent", params.clone());
        params["type"] = "keyUp".into();
        self.order("Input.dispatchKeyEvent", params);
    }

    /// Makes the window so large, in a theme.
    pub(crate) fn emulate(&mut self, width: u32, height: u32, theme: &str) {
        let size =
            json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.order("Emulation.setDeviceMetricsOverride", size);
        let theme = json!({ "features": [{ "name": "prefers-color-scheme", "value": theme }] });
        self.order("Emulation.setEmulatedMedia", theme);
    }

    /// The events of one kind.
    pub(crate) fn events(&self, method: &str) -> Vec<&Value> {
        self.events.iter().filter(|event| event["method"] == method).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // So that its other processes end and its folder is no longer written to.
        let close = json!({ "id": 0, "method": "Browser.close" });
        let _ = self.orders.write_all(format!("{close}\0").as_bytes());
        if wait(&mut self.child, Duration::from_secs(10)).is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
