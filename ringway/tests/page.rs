//! `ringway top --serve`, as a browser sees it, and as somebody who means no good does.

use crate::common::browser::Browser;
use crate::common::{Daemon, PATIENCE, folder, read, ringway, run, text, write};
use ringway_driver::{Device, Options};
use serde_json::Value;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

fn serve(dir: &Path, image: &str) -> Daemon {
    Daemon::serve(dir, &[image, "--socket", "s", "--control", "ctl", "--workers", "1"])
}

/// A page that is served, and the address it told.
struct Page {
    daemon: Daemon,
    address: String,
}

impl Page {
    fn serve(dir: &Path, args: &[&str]) -> Self {
        let mut command = ringway();
        command.args(["top", "--control", "ctl", "--interval", "200ms", "--serve"]);
        command.args(args).current_dir(dir);
        let daemon = Daemon::start(command);
        let address = daemon.ready.trim().to_owned();
        Self { daemon, address }
    }

    fn new(dir: &Path) -> Self {
        Self::serve(dir, &["127.0.0.1:0"])
    }

    /// `127.0.0.1:PORT`
    fn place(&self) -> &str {
        self.address.strip_prefix("http://").unwrap().trim_end_matches('/')
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.place()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// The answer to these bytes.
    #[track_caller]
    fn send(&self, bytes: &[u8]) -> Answer {
        let mut stream = self.connect();
        // It may have been refused before all of it is sent.
        let _ = stream.write_all(bytes);
        Answer::read(&mut stream)
    }

    #[track_caller]
    fn get(&self, path: &str) -> Answer {
        let place = self.place();
        self.send(
            format!("GET {path} HTTP/1.1\r\nHost: {place}\r\nConnection: close\r\n\r\n").as_bytes(),
        )
    }

    #[track_caller]
    fn data(&self, query: &str) -> Value {
        let answer = self.get(&format!("/data?{query}"));
        assert_eq!(answer.status, 200, "{answer:?}");
        serde_json::from_str(&answer.body).unwrap()
    }

    /// Asks until the answer is as wanted.
    #[track_caller]
    fn data_until(&self, query: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let data = self.data(query);
            if wanted(&data) {
                return data;
            }
            assert!(Instant::now() < deadline, "never as wanted: {data}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// An answer; status 0 if the connection was closed without one.
#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    #[track_caller]
    fn read(stream: &mut impl Read) -> Self {
        let mut bytes = Vec::new();
        match stream.read_to_end(&mut bytes) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
            Err(error) => panic!("{error} after {:?}", text(&bytes)),
        }
        let all = text(&bytes);
        let (head, body) = all.split_once("\r\n\r\n").unwrap_or((&all, ""));
        let status = head.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or(0);
        Self { status, head: head.to_lowercase(), body: body.into() }
    }
}

/// `ringway ARGS`, run in `dir`: its JSON.
fn json_of(dir: &Path, args: &[&str]) -> Value {
    let mut command = ringway();
    command.args(args).current_dir(dir);
    let output = run(command);
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn stats(dir: &Path) -> Value {
    json_of(dir, &["ctl", "--control", "ctl", "stats", "--json"])
}

fn connect(dir: &Path) -> Device {
    Options::new().patience(PATIENCE).connect(dir.join("s")).unwrap()
}

/// Some reads and writes, all of them answered.
fn use_disk(device: &mut Device) {
    let mut queue = device.queue().unwrap();
    for sector in 0..40 {
        assert!(write(device, &mut queue, sector, 7));
    }
    (0..25).for_each(|sector| drop(read(device, &mut queue, sector)));
}

#[test]
fn the_parts_of_the_page_come_with_all_that_keeps_others_out() {
    let dir = folder();
    let _daemon = serve(dir.path(), "disk.img");
    let page = Page::new(dir.path());
    for (path, kind) in [
        ("/", "text/html"),
        ("/page.css", "text/css"),
        ("/page.js", "text/javascript"),
        ("/charts.js", "text/javascript"),
        ("/icon.svg", "image/svg+xml"),
        ("/data", "application/json"),
        ("/figures", "application/json"),
        ("/nothing", "text/plain"),
    ] {
        // As from the page of a foreign site.
        let place = page.place();
        let ask = format!(
            "GET {path} HTTP/1.1\r\nHost: {place}\r\nOrigin: http://evil.example\r\nConnection: close\r\n\r\n"
        );
        // The daemon has not told any figures yet, on a busy host.
        let begun = Instant::now();
        let answer = loop {
            let answer = page.send(ask.as_bytes());
            if answer.status != 503 || begun.elapsed() > PATIENCE {
                break answer;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        assert_eq!(answer.status, if path == "/nothing" { 404 } else { 200 }, "{path}");
        for line in [
            &*format!("content-type: {kind}"),
            "content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'",
            "frame-ancestors 'none'",
            "x-content-type-options: nosniff",
            "x-frame-options: deny",
            "referrer-policy: no-referrer",
            "cross-origin-resource-policy: same-origin",
            "cache-control: no-store",
        ] {
            assert!(answer.head.contains(line), "{path}: {line}: {}", answer.head);
        }
        assert!(!answer.head.contains("access-control"), "{}", answer.head);
        assert!(!answer.body.is_empty());
    }
    let place = page.place();
    let head = page
        .send(format!("HEAD / HTTP/1.1\r\nHost: {place}\r\nConnection: close\r\n\r\n").as_bytes());
    assert_eq!((head.status, &*head.body), (200, ""));
}

#[test]
fn what_is_no_plain_question_is_refused_and_harms_nobody() {
    let dir = folder();
    let _daemon = serve(dir.path(), "disk.img");
    let page = Page::serve(dir.path(), &["127.0.0.1:0", "--serve-name", "host.example"]);
    let place = page.place();
    for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "GARBAGE"] {
        let answer = page.send(
            format!("{method} /data HTTP/1.1\r\nHost: {place}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").as_bytes(),
        );
        assert_eq!(answer.status, 405, "{method}");
        assert!(answer.head.contains("allow: get, head"), "{}", answer.head);
    }
    let close = "Connection: close\r\n\r\n";
    for (request, status) in [
        // A name that somebody else may own.
        (format!("GET / HTTP/1.1\r\nHost: evil.example\r\n{close}"), 421),
        (format!("GET /data HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n{close}"), 421),
        (format!("GET http://evil.example/data HTTP/1.1\r\nHost: {place}\r\n{close}"), 421),
        (format!("GET http://{place}/data HTTP/1.1\r\nHost: evil.example\r\n{close}"), 421),
        (format!("GET / HTTP/1.1\r\nHost: evil@localhost\r\n{close}"), 421),
        (format!("GET / HTTP/1.1\r\n{close}"), 400),
        (format!("GET / HTTP/1.1\r\nHost: {place}\r\nHost: evil.example\r\n{close}"), 400),
        // Names of ours, through whatever port they were reached.
        (format!("GET / HTTP/1.1\r\nHost: localhost:1234\r\n{close}"), 200),
        (format!("GET / HTTP/1.1\r\nHost: [::1]:80\r\n{close}"), 200),
        (format!("GET / HTTP/1.1\r\nHost: HOST.example\r\n{close}"), 200),
        (format!("GET http://{place}/ HTTP/1.1\r\nHost: {place}\r\n{close}"), 200),
        // Questions that make no sense.
        (format!("GET /data?disk=x HTTP/1.1\r\nHost: {place}\r\n{close}"), 400),
        (format!("GET /data?disk=0&more HTTP/1.1\r\nHost: {place}\r\n{close}"), 400),
        (format!("GET /../../etc/passwd HTTP/1.1\r\nHost: {place}\r\n{close}"), 404),
        (format!("GET /%2e%2e/etc/passwd HTTP/1.1\r\nHost: {place}\r\n{close}"), 404),
        // A body that never comes is not waited for.
        (format!("GET / HTTP/1.1\r\nHost: {place}\r\nContent-Length: 99999999\r\n{close}"), 200),
        // A head without end, and one of many lines.
        (format!("GET / HTTP/1.1\r\nHost: {place}\r\nX: {}\r\n{close}", "a".repeat(99_999)), 431),
        (format!("GET / HTTP/1.1\r\nHost: {place}\r\n{}{close}", "X: a\r\n".repeat(500)), 431),
        (format!("GET /{} HTTP/1.1\r\nHost: {place}\r\n{close}", "a".repeat(99_999)), 414),
    ] {
        let answer = page.send(request.as_bytes());
        let short = request.get(..80).unwrap_or(&request);
        let refused_early = matches!((status, answer.status), (414, 431) | (414 | 431, 400 | 0));
        assert!(answer.status == status || refused_early, "{short}: {answer:?}");
        assert!(status < 400 || !answer.body.contains("ringway top</h1>"), "{short}");
    }
    let garbage: [&[u8]; 5] = [
        b"\0\0\0\0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        &[0xff; 70_000],
    ];
    for bytes in garbage {
        let mut stream = page.connect();
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let answer = Answer::read(&mut stream);
        assert!(matches!(answer.status, 0 | 400 | 431 | 505), "{answer:?}");
    }
    assert_eq!(page.get("/data").status, 200);
}

/// Connections are bounded: those that say nothing, and those that do not read, make room.
#[test]
fn silent_clients_keep_nobody_out() {
    let dir = folder();
    let _daemon = serve(dir.path(), "disk.img");
    let page = Page::new(dir.path());
    let place = page.place();
    let mut idle: Vec<_> = (0..90).map(|_| page.connect()).collect();
    // Half a request, and answers that are not read.
    for (at, stream) in idle.iter_mut().enumerate() {
        let half = format!("GET / HTTP/1.1\r\nHost: {place}\r\nX: ");
        let many = format!("GET /page.js HTTP/1.1\r\nHost: {place}\r\n\r\n").repeat(100);
        let _ = stream.write_all(if at % 2 == 0 { half.as_bytes() } else { many.as_bytes() });
    }
    for _ in 0..20 {
        assert_eq!(page.get("/data").status, 200);
    }
    // The oldest have been closed, and no more than there may be are left.
    let closed = |stream: &mut TcpStream| {
        stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let mut bytes = [0; 65_536];
        loop {
            match stream.read(&mut bytes) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return error.kind() == ErrorKind::ConnectionReset,
            }
        }
    };
    let gone = idle.iter_mut().map(closed).filter(|gone| *gone).count();
    assert!(gone >= 26, "{gone} of 90 were closed");
}

#[test]
fn a_socket_is_for_its_user_alone_and_goes_with_the_process() {
    let dir = folder();
    let _daemon = serve(dir.path(), "disk.img");
    let path = dir.path().join("page");
    // Left over by one that was killed.
    let killed = Page::serve(dir.path(), &["unix:page"]);
    killed.daemon.kill();
    assert!(path.exists());
    let mut page = Page::serve(dir.path(), &["unix:page"]);
    assert_eq!(page.address, "unix:page");
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let mut stream = UnixStream::connect(&path).unwrap();
    stream
        .write_all(b"GET /data HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .unwrap();
    assert_eq!(Answer::read(&mut stream).status, 200);
    let mut second = ringway();
    second.args(["top", "--control", "ctl", "--serve", "unix:page"]).current_dir(dir.path());
    let said = text(&run(second).stderr);
    assert!(said.contains("somebody listens there already"), "{said}");
    page.daemon.signal(libc::SIGTERM);
    assert_eq!(page.daemon.wait().0.code(), Some(128 + libc::SIGTERM));
    assert!(!path.exists());
}

#[test]
fn what_cannot_be_served_is_said_at_once() {
    let dir = folder();
    let _daemon = serve(dir.path(), "disk.img");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    for (args, status, what) in [
        (&["--serve", "9097"][..], 2, "give 127.0.0.1:PORT"),
        (&["--serve", "example.org:80"], 2, "give 127.0.0.1:PORT"),
        (&["--serve", "127.0.0.1:0", "--json"], 2, "cannot be used with"),
        (&["--serve-remote"], 2, "--serve <ADDRESS>"),
        (&["--serve", "0.0.0.0:0"], 1, "add --serve-remote if that is meant"),
        (&["--serve", &taken], 1, "in use"),
        (&["--serve", "unix:disk.img"], 1, "it is no socket"),
        (&["--serve", "unix:none/page"], 1, "cannot listen at none/page"),
        (&["--serve", "127.0.0.1:0", "--control", "nobody"], 1, "there is no socket at nobody"),
    ] {
        let mut command = ringway();
        let named = args.contains(&"--control");
        command.arg("top").args(args).current_dir(dir.path());
        command.args(if named { &[][..] } else { &["--control", "ctl"] });
        let output = run(command);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {said}");
        assert!(said.contains(what), "{args:?}: {said}");
    }
    assert_eq!(std::fs::metadata(dir.path().join("disk.img")).unwrap().len(), 1 << 20);
}

#[test]
fn a_page_that_comes_later_hears_what_was_before_and_what_became_of_the_daemon() {
    let dir = folder();
    let daemon = serve(dir.path(), "disk.img");
    let page = Page::new(dir.path());
    // Before anybody connects.
    page.data_until("", |data| data["points"]["at"][0].is_u64());
    let mut device = connect(dir.path());
    use_disk(&mut device);
    let counted = stats(dir.path())["disks"][0]["counts"].clone();
    assert_eq!(counted["writes"], 40);
    let data = page.data_until("disk=0", |data| data["detail"]["counts"] == counted);
    let written = |data: &Value| -> f64 {
        data["points"]["writes_s"].as_array().unwrap().iter().map(|n| n.as_f64().unwrap()).sum()
    };
    assert!(written(&data) > 0.0, "{data}");
    let figures: Value = serde_json::from_str(&page.get("/figures").body).unwrap();
    let top = json_of(dir.path(), &["top", "--control", "ctl", "--json", "--interval", "100ms"]);
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&figures), keys(&top));
    assert_eq!(keys(&figures["disks"][0]), keys(&top["disks"][0]));
    // Only what is new.
    let since = data["at"].as_u64().unwrap();
    let newer =
        page.data_until(&format!("disk=0&since={since}"), |data| data["points"]["at"][0].is_u64());
    let moments = newer["points"]["at"].as_array().unwrap();
    assert!(!moments.is_empty() && moments.iter().all(|at| at.as_u64() > Some(since)));

    // What is over before the daemon is asked again.
    for change in ["pause", "resume"] {
        json_of(dir.path(), &["ctl", "--control", "ctl", "--json", change, "s"]);
    }
    let kinds = |data: &Value| -> Vec<String> {
        let all = data["events"].as_array().unwrap().iter();
        all.map(|one| one["kind"].as_str().unwrap().to_owned()).collect()
    };
    let events = page.data_until("", |data| kinds(data).ends_with(&["resumed".into()]));
    assert_eq!(kinds(&events), ["connected", "paused", "resumed"]);

    daemon.kill();
    let lost = page.data_until("disk=0", |data| !data["lost"].is_null());
    assert!(lost["lost"].as_str().unwrap().contains("no one listens"), "{}", lost["lost"]);
    assert_eq!(lost["detail"]["counts"], counted, "what was heard last");
    let _daemon = serve(dir.path(), "disk.img");
    let back = page.data_until("disk=0", |data| {
        data["lost"].is_null() && data["detail"]["counts"]["writes"] == 0
    });
    assert!(written(&back) > 0.0, "the past of the same image stays: {back}");
    // The device connects to the new daemon whenever it can.
    let since_then: Vec<_> = kinds(&back)[3..].to_vec();
    let of_the_daemon: Vec<_> =
        since_then.iter().filter(|kind| kind.starts_with("daemon")).collect();
    assert_eq!(of_the_daemon, ["daemon lost", "daemon restarted"], "{since_then:?}");
}

/// What the page shows of a count, without the blanks between its digits.
fn shown(browser: &mut Browser, count: &str) -> Value {
    let text =
        browser.eval(&format!("document.querySelector('[data-count={count}]')?.textContent"));
    let digits: String = text.as_str().unwrap_or("").chars().filter(char::is_ascii_digit).collect();
    digits.parse::<u64>().map_or(Value::Null, Value::from)
}

#[test]
fn a_browser_shows_what_ctl_tells() {
    let dir = folder();
    // Whoever may name an image must not have the page do anything.
    let image = "<img src=x onerror=alert(1)>&amp;'\"`${1}\u{202e}.img";
    std::fs::rename(dir.path().join("disk.img"), dir.path().join(image)).unwrap();
    let daemon = serve(dir.path(), image);
    let mut page = Page::new(dir.path());
    let mut device = connect(dir.path());
    use_disk(&mut device);
    let Some(mut browser) = Browser::start() else { return };
    browser.open(&format!("{}#disk=0", page.address));
    browser.until("document.getElementById('status').textContent === 'live'");

    let disk = stats(dir.path())["disks"][0].clone();
    let counts = disk["counts"].clone();
    browser.until(&format!(
        "document.querySelector('[data-count=written_bytes]')?.value === '{}'",
        counts["written_bytes"]
    ));
    for name in
        ["reads", "writes", "flushes", "erases", "errors", "refused", "failed", "merged", "held"]
    {
        assert_eq!(shown(&mut browser, name), counts[name], "{name}");
    }
    assert_eq!(shown(&mut browser, "read_bytes"), counts["read_bytes"]);
    assert_eq!(browser.eval("document.getElementById('name').textContent"), disk["image"]);
    assert_eq!(browser.eval("document.images.length"), 0);
    assert_eq!(browser.eval("document.querySelector('#disk-0').dataset.state"), "connected");
    // IOPS, MB/s, percentiles; the heat map has what was timed.
    assert_eq!(browser.eval("document.querySelectorAll('figure.chart').length"), 4);
    assert_eq!(
        browser.eval("document.querySelector('.chart path.series').getAttribute('d') !== ''"),
        true
    );
    let timed = disk["latency"]["writes"]["count"].as_u64().unwrap();
    assert!(timed > 0, "{disk}");
    let coloured = "(() => { const c = document.querySelector('canvas'); \
        return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v) => v) })()";
    browser.until(coloured);

    walk(&mut browser);
    sizes(&mut browser);

    daemon.kill();
    browser.until("!document.getElementById('alert').hidden");
    let alert = browser.eval("document.getElementById('alert').textContent");
    assert!(alert.as_str().unwrap().starts_with("The daemon does not answer"), "{alert}");
    let daemon = serve(dir.path(), image);
    browser.until("document.getElementById('alert').hidden");
    let process = format!("process {}", daemon.pid());
    browser.until(&format!("document.getElementById('daemon').textContent.includes('{process}')"));
    browser.until("document.getElementById('events').textContent.includes('daemon restarted')");

    // So far nothing was complained of, and nobody else was asked for anything.
    for kind in ["Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"] {
        assert!(browser.events(kind).is_empty(), "{:?}", browser.events(kind));
    }
    let asked = browser.events("Network.requestWillBeSent");
    let urls = asked.iter().map(|event| event["params"]["request"]["url"].as_str().unwrap());
    let (ours, others): (Vec<_>, Vec<_>) = urls.partition(|url| url.starts_with(&page.address));
    assert!(ours.len() > 5 && others.is_empty(), "{others:?}");

    page.daemon.signal(libc::SIGTERM);
    page.daemon.wait();
    browser.until("document.getElementById('status').textContent === 'page lost'");
}

/// All of it by keyboard.
fn walk(browser: &mut Browser) {
    let chosen = "document.querySelector('[aria-selected=true]').id";
    browser.press("/");
    assert_eq!(browser.eval("document.activeElement.id"), "search");
    browser.order("Input.insertText", serde_json::json!({ "text": "nobody is called so" }));
    browser.until("document.querySelectorAll('#disks .disk').length === 1");
    browser.eval("document.getElementById('search').value = ''; 0");
    browser.press("ArrowDown");
    browser.until("document.activeElement.id === 'disks'");
    browser.press("Home");
    browser.until(&format!("{chosen} === 'disk-all'"));
    browser.until("document.getElementById('detail').hidden");
    browser.until("document.querySelectorAll('#disks .disk').length === 2");
    browser.press("ArrowDown");
    browser.until(&format!("{chosen} === 'disk-0'"));
    browser.until("!document.getElementById('detail').hidden");
    assert_eq!(browser.eval("location.hash"), "#disk=0");

    // A moment of each chart, in words; and its table.
    for chart in 0..4 {
        let find = format!("document.querySelectorAll('figure.chart')[{chart}]");
        browser.eval(&format!("{find}.querySelector('.plot').focus(); 0"));
        browser.press("ArrowLeft");
        browser.until(&format!("!{find}.querySelector('.tip').hidden"));
        let tip = browser.eval(&format!("{find}.querySelector('.tip').textContent"));
        assert!(tip.as_str().unwrap().lines().count() >= 2, "{tip}");
        browser.press("Escape");
        browser.until(&format!("{find}.querySelector('.tip').hidden"));
        browser.eval(&format!("{find}.querySelector('button').click(); 0"));
        browser.until(&format!("{find}.querySelectorAll('tbody tr').length > 1"));
        browser.eval(&format!("{find}.querySelector('button').click(); 0"));
    }
    browser.eval("document.activeElement.blur(); 0");
    browser.press("p");
    browser.until("document.getElementById('status').textContent === 'paused'");
    browser.press("p");
    browser.until("document.getElementById('status').textContent === 'live'");
    // All that the Tab key meets, in the order of reading.
    browser.eval("document.querySelector('.skip').focus(); 0");
    let mut met = Vec::new();
    for _ in 0..19 {
        met.push(browser.eval("document.activeElement.id || document.activeElement.className"));
        browser.press("Tab");
    }
    let mut order = vec!["skip", "pause", "theme", "help", "search", "sort", "disks", "range"];
    order.extend(["", "plot"].repeat(4));
    order.extend(["queues", "workers", "events"]);
    assert_eq!(met, order);
}

/// Nothing is wider than the window, in either theme.
fn sizes(browser: &mut Browser) {
    for width in [480, 760, 1000, 1600] {
        let mut colours = Vec::new();
        for theme in ["light", "dark"] {
            browser.emulate(width, 900, theme);
            browser.until(&format!("innerWidth === {width}"));
            browser.until(
                "document.documentElement.scrollWidth <= document.documentElement.clientWidth",
            );
            colours.push(browser.eval("getComputedStyle(document.body).backgroundColor"));
        }
        assert_ne!(colours[0], colours[1], "the theme of the system is followed");
    }
    browser.eval("document.getElementById('theme').click(); 0");
    assert_eq!(browser.eval("document.documentElement.dataset.theme"), "light");
    browser.eval("for (const _ of [1, 2]) document.getElementById('theme').click(); 0");
    assert_eq!(browser.eval("document.documentElement.dataset.theme ?? ''"), "");
}
