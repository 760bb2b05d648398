//! `ringway serve --metrics`, from outside: by hand, by hostile clients, by Prometheus.

mod common;

use common::{Daemon, PATIENCE, folder, read, ringway, run, text, write};
use ringway_control::metrics::{ALL, MetricKind};
use ringway_driver::{BlkQueue, Device, Options};
use ringway_testkit::LateStore;
use ringway_testkit::raw::{DATA, F_VERSION_1, RawGuest};
use ringway_testkit::skip::{Need, skip};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Asks on a connection: the head of the answer and the rest.
fn ask(mut stream: impl Read + Write, path: &str, accept: &str) -> (String, String) {
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer:?}"));
    (head.to_owned(), body.to_owned())
}

fn unix(dir: &Path) -> UnixStream {
    let stream = UnixStream::connect(dir.join("m")).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// The values of all series.
fn scrape(dir: &Path) -> BTreeMap<String, f64> {
    // An answer may be told again for a moment.
    std::thread::sleep(Duration::from_millis(100));
    values(&ask(unix(dir), "/metrics", "text/plain").1)
}

fn values(text: &str) -> BTreeMap<String, f64> {
    let series = text.lines().filter(|line| !line.starts_with('#'));
    let pair = |line: &str| {
        let (name, value) = line.rsplit_once(' ').unwrap();
        (name.to_owned(), value.parse().unwrap_or_else(|_| panic!("{line}")))
    };
    series.map(pair).collect()
}

/// A port that nobody has.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn metrics_say_what_has_happened() {
    let dir = folder();
    let args = ["disk.img", "--socket", "s", "--queues", "2", "--metrics", "unix:m"];
    let daemon = Daemon::serve(dir.path(), &args);
    let mode = dir.path().join("m").metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let disk = format!("disk=\"{}\"", dir.path().join("s").display());
    let of = |values: &BTreeMap<String, f64>, name: &str, labels: &str| {
        let comma = if labels.is_empty() { "" } else { "," };
        let series = format!("{name}{{{disk}{comma}{labels}}}");
        *values.get(&series).unwrap_or_else(|| panic!("no {series} in {values:#?}"))
    };
    let before = scrape(dir.path());
    assert_eq!(of(&before, "ringway_disk_connected", ""), 0.0);
    assert_eq!(of(&before, "ringway_disk_size_bytes", ""), f64::from(1 << 20));

    let mut device = Options::new().patience(PATIENCE).connect(dir.path().join("s")).unwrap();
    let mut queue = device.queue().unwrap();
    for sector in 0..200 {
        assert!(write(&device, &mut queue, sector, 7));
        read(&device, &mut queue, sector);
    }
    let during = scrape(dir.path());
    drop((queue, device));
    let after = loop {
        let values = scrape(dir.path());
        if of(&values, "ringway_disk_queues", "") == 0.0 {
            break values;
        }
    };
    for values in [&during, &after] {
        for operation in ["read", "write"] {
            let labels = format!("operation=\"{operation}\"");
            assert_eq!(of(values, "ringway_disk_requests_total", &labels), 200.0);
            assert_eq!(of(values, "ringway_disk_bytes_total", &labels), 200.0 * 512.0);
            // One of 61, of 400 in all.
            let timed = of(values, "ringway_disk_request_duration_seconds_count", &labels);
            assert!((1.0..=7.0).contains(&timed), "{operation}: {timed}");
            let name = "ringway_disk_request_duration_seconds_bucket";
            let bucket = |le: &str| values[&format!("{name}{{le=\"{le}\",{disk},{labels}}}")];
            assert_eq!(bucket("+Inf"), timed);
            assert!(bucket("0.000005") <= bucket("30.0"));
        }
    }
    assert_eq!(of(&during, "ringway_disk_connected", ""), 1.0);
    assert!(of(&during, "ringway_disk_kicks_total", "") > 0.0);
    let none = "operation=\"write\",error=\"no-space\"";
    assert_eq!(of(&during, "ringway_disk_host_errors_total", none), 0.0);
    assert_eq!(of(&during, "ringway_disk_state", "state=\"serving\""), 1.0);
    let workers = |name: &str| -> f64 {
        during.iter().filter(|(series, _)| series.starts_with(name)).map(|(_, value)| value).sum()
    };
    assert_eq!(workers("ringway_worker_requests_total{"), 400.0);
    assert_eq!(workers("ringway_worker_batch_requests_sum{"), 400.0);
    assert!(during["process_resident_memory_bytes"] > 1e6);
    assert!(!dir.path().join("m.sock").exists());
    daemon.stop();
    assert!(!dir.path().join("m").exists(), "the socket goes with the daemon");
}

#[test]
fn what_is_told_is_what_the_list_says() {
    let dir = folder();
    std::fs::write(
        dir.path().join("c.toml"),
        "metrics = 'unix:m'\n[[disk]]\nimage = 'disk.img'\nsocket = 's'\n\
         [[disk]]\nimage = 'null:1G'\nsocket = 'odd\"\\name'\nisolate = true\n",
    )
    .unwrap();
    let _daemon = Daemon::serve(dir.path(), &["--config", "c.toml"]);
    let accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5";
    for (accept, kind) in [(accept, "openmetrics-text"), ("*/*", "text/plain")] {
        let (head, body) = ask(unix(dir.path()), "/metrics", accept);
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains(kind), "{head}");
        assert_eq!(body.ends_with("# EOF\n"), kind == "openmetrics-text");
        let described = |mark: &str| -> BTreeMap<String, String> {
            let lines = body.lines().filter_map(|line| line.strip_prefix(mark)?.split_once(' '));
            lines.map(|(name, rest)| (name.to_owned(), rest.to_owned())).collect()
        };
        let (help, types) = (described("# HELP "), described("# TYPE "));
        let mut families = BTreeSet::new();
        for metric in ALL {
            let name = match (metric.kind, kind) {
                (MetricKind::Counter, "openmetrics-text") => metric.name.trim_end_matches("_total"),
                _ => metric.name,
            };
            assert_eq!(help.get(name).map(String::as_str), Some(metric.help), "{name}");
            assert_eq!(types.get(name).map(String::as_str), Some(metric.kind.word()), "{name}");
            families.insert(name.to_owned());
        }
        assert_eq!(help.keys().cloned().collect::<BTreeSet<_>>(), families);
        // Each series has the labels of its metric, and no others.
        for series in body.lines().filter(|line| !line.starts_with('#')) {
            let name = series.split(['{', ' ']).next().unwrap();
            let metric = ALL.iter().find(|metric| match metric.kind {
                MetricKind::Histogram => name
                    .strip_prefix(metric.name)
                    .is_some_and(|end| ["_bucket", "_sum", "_count"].contains(&end)),
                _ => name == metric.name,
            });
            let metric = metric.unwrap_or_else(|| panic!("{series}"));
            let labels = metric.labels.iter().all(|label| series.contains(&format!("{label}=\"")));
            assert!(labels, "{series}");
        }
        let odd = format!("{}/odd\\\"\\\\name", dir.path().canonicalize().unwrap().display());
        assert!(body.contains(&format!("disk=\"{odd}\"")), "{body}");
        assert!(body.contains("worker=\"1:null/0\""), "{body}");
    }
}

/// Those that are set, of disks and of groups, and who is in which; one that is lifted is told no more.
#[test]
fn limits_that_are_set_are_told() {
    let dir = folder();
    let toml = "control = 'ctl'\nmetrics = 'unix:m'\n\
                [[limit-group]]\nname = 'go\"ld'\nlimits = { bps = '1M', bps-max = '4M' }\n\
                [[disk]]\nimage = 'disk.img'\nsocket = 's'\nlimits = { iops = 500, iops-size = '16K' }\n\
                limit-group = 'go\"ld'\n\
                [[disk]]\nimage = 'null:1G'\nsocket = 't'\n";
    std::fs::write(dir.path().join("c.toml"), toml).unwrap();
    let _daemon = Daemon::serve(dir.path(), &["--config", "c.toml"]);
    let figures = || -> Vec<(String, f64)> {
        let folder = format!("{}/", dir.path().canonicalize().unwrap().display());
        let all = scrape(dir.path()).into_iter();
        let limits = all.filter(|(name, _)| name.contains("_limit"));
        limits.map(|(name, value)| (name.replace(&folder, ""), value)).collect()
    };
    let series =
        |name: &str, labels: &str, value: f64| (format!("ringway_{name}{{{labels}}}"), value);
    let gold = [
        series("disk_limit_group_info", r#"disk="s",group="go\"ld""#, 1.0),
        series("limit_group_limit", r#"group="go\"ld",limit="bps""#, f64::from(1 << 20)),
        series("limit_group_limit", r#"group="go\"ld",limit="bps-max""#, f64::from(4 << 20)),
    ];
    let iops = |value| series("disk_limit", r#"disk="s",limit="iops""#, value);
    let size = series("disk_limit", r#"disk="s",limit="iops-size""#, f64::from(16 << 10));
    let sorted = |parts: &[&[(String, f64)]]| {
        let mut all = parts.concat();
        all.sort_by(|one, other| one.0.cmp(&other.0));
        all
    };
    assert_eq!(figures(), sorted(&[&[size, iops(500.0)], &gold]));
    let mut ctl = ringway();
    ctl.args(["ctl", "--control", "ctl", "limit", "disk.img", "--lift", "--iops", "600"]);
    ctl.current_dir(dir.path());
    assert!(run(ctl).status.success());
    assert_eq!(figures(), sorted(&[&[iops(600.0)], &gold[..]]));
}

#[test]
fn e11_clients_of_metrics_cost_themselves_alone() {
    let dir = folder();
    let port = free_port();
    let at = format!("127.0.0.1:{port}");
    let args = ["disk.img", "--socket", "s", "--metrics", &at];
    let daemon = Daemon::serve(dir.path(), &args);
    let connect = || {
        let stream = TcpStream::connect(&at).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    };
    // They connect and say nothing; they begin and do not end; they talk nonsense; they do not read.
    let mut crowd = Vec::new();
    for round in 0..300 {
        let mut stream = connect();
        let said: &[u8] = match round % 4 {
            0 => b"",
            1 => b"GET /metrics HTTP/1.1\r\nHost:",
            2 => &[0xff; 4096],
            _ => b"GET /metrics HTTP/1.1\r\n\r\n",
        };
        // The daemon may have had enough of it already.
        let _ = stream.write_all(said);
        crowd.push(stream);
    }
    let (head, body) = ask(connect(), "/metrics", "*/*");
    assert!(head.starts_with("HTTP/1.1 200 OK") && body.contains("ringway_disk_info"), "{head}");
    let open = std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap().count();
    assert!(open < 100, "{open} descriptors");
    // A thread for a client would have the name of the one that starts it.
    let threads = common::threads(daemon.pid());
    let theirs = threads.iter().filter(|thread| thread.field("Name").starts_with("metrics"));
    assert_eq!(theirs.count(), 1);
    let mut device = Options::new().patience(PATIENCE).connect(dir.path().join("s")).unwrap();
    let mut queue = device.queue().unwrap();
    assert!(write(&device, &mut queue, 3, 9));
    let (head, _) = ask(connect(), "/etc/passwd", "*/*");
    assert!(head.starts_with("HTTP/1.1 404"), "{head}");
    drop(crowd);
    daemon.stop();
}

/// A browser that shows a foreign site sends that site's name, whatever address it connects to.
#[test]
fn e20_metrics_are_told_under_names_of_our_own_only() {
    let dir = folder();
    let toml = "metrics = '127.0.0.1:0'\nmetrics-name = ['vmhost.example']\n\
                [[disk]]\nimage = 'disk.img'\nsocket = 's'\n";
    std::fs::write(dir.path().join("c.toml"), toml).unwrap();
    let mut daemon = Daemon::serve(dir.path(), &["--config", "c.toml"]);
    let line = (0..20).map(|_| daemon.next_line()).find(|line| line.contains("http://"));
    let (_, rest) = line.as_deref().unwrap().split_once("http://").unwrap();
    let (at, _) = rest.split_once('/').unwrap();
    let status = |host: &str, path: &str| {
        let mut stream = TcpStream::connect(at).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let has_figures = answer.contains("ringway_disk_info") || answer.contains("disk.img");
        (answer.split(' ').nth(1).unwrap().to_owned(), has_figures)
    };
    for host in [at, "localhost", "[::1]:9099", "VMhost.example:9099"] {
        assert_eq!(status(host, "/metrics"), ("200".into(), true), "{host}");
    }
    for host in ["evil.example", "evil.example:9099", "127.0.0.1.evil.example", "ringway"] {
        for path in ["/metrics", "/", "/nothing"] {
            assert_eq!(status(host, path), ("421".into(), false), "{host}");
        }
    }
    daemon.stop();
}

#[test]
fn a_place_that_cannot_be_had_is_told_and_nothing_is_left() {
    let dir = folder();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = taken.local_addr().unwrap().to_string();
    let before = common::snapshot(dir.path());
    for (at, status, what) in [
        (at.as_str(), 1, "Address already in use"),
        ("unix:no/folder/m", 1, "no/folder"),
        ("everywhere", 2, "'everywhere' is no place for metrics: give 127.0.0.1:9099"),
    ] {
        let mut command = ringway();
        let args = ["serve", "disk.img", "--socket", "s", "--control", "c", "--metrics", at];
        command.args(args).current_dir(dir.path());
        let output = run(command);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{said}");
        assert!(said.contains(what) && said.contains(at), "{said}");
        assert_eq!(common::snapshot(dir.path()), before);
    }
}

/// Killed with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn contrib() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../contrib/prometheus")
}

fn lacks_prometheus() -> bool {
    let there = |name: &str| Command::new(name).arg("--version").output().is_ok();
    let lacks = !there("promtool") || !there("prometheus");
    if lacks {
        skip(Need::Prometheus, "apt install prometheus");
    }
    lacks
}

#[test]
fn promtool_finds_nothing_wrong_with_metrics_and_rules() {
    if lacks_prometheus() {
        return;
    }
    let dir = folder();
    let _daemon = Daemon::serve(dir.path(), &["disk.img", "--socket", "s", "--metrics", "unix:m"]);
    let (_, body) = ask(unix(dir.path()), "/metrics", "*/*");
    let mut check = Command::new("promtool");
    check.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut check = check.stderr(Stdio::piped()).spawn().unwrap();
    check.stdin.take().unwrap().write_all(body.as_bytes()).unwrap();
    let output = check.wait_with_output().unwrap();
    let said = text(&output.stdout) + &text(&output.stderr);
    assert!(output.status.success() && said.trim().is_empty(), "{said}");
    for args in [["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]] {
        let mut promtool = Command::new("promtool");
        promtool.args(args).current_dir(contrib());
        let output = run(promtool);
        assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    }
}

/// A Prometheus that scrapes a daemon each second, with the alert rules that are shipped.
struct Prometheus {
    _process: Running,
    port: u16,
    begun: Instant,
}

impl Prometheus {
    fn watch(dir: &Path, daemon: &str) -> Self {
        let port = free_port();
        let rules = contrib().join("alerts.yml").canonicalize().unwrap();
        let config = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: ['{}']\n\
             scrape_configs: [{{job_name: ringway, static_configs: [{{targets: ['{daemon}']}}]}}]\n",
            rules.display()
        );
        std::fs::write(dir.join("p.yml"), config).unwrap();
        let mut prometheus = Command::new("prometheus");
        prometheus
            .args(["--config.file=p.yml", "--storage.tsdb.path=data", "--log.level=error"])
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .current_dir(dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let process = Running(prometheus.spawn().unwrap());
        Self { _process: process, port, begun: Instant::now() }
    }

    fn get(&self, path: &str) -> Option<Value> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        let request = format!("GET {path} HTTP/1.0\r\n\r\n");
        stream.write_all(request.as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()
    }

    fn wait_for(&self, path: &str, found: &dyn Fn(&Value) -> bool) {
        loop {
            let answer = self.get(path).unwrap_or_default();
            if found(&answer["data"]) {
                return;
            }
            assert!(self.begun.elapsed() < PATIENCE * 2, "{path}: {answer:#}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Waits until these alerts are there and no others: their names, their disks, and whether they are
    /// `firing` or `pending`.
    fn wait_for_alerts(&self, wanted: &[[&str; 3]]) {
        self.wait_for("/api/v1/alerts", &|data| {
            let alerts = data["alerts"].as_array();
            let words = |alert: &Value| {
                let labels = &alert["labels"];
                [&labels["alertname"], &labels["disk"], &alert["state"]]
                    .map(|word| word.as_str().unwrap_or_default().to_owned())
            };
            alerts.is_some_and(|alerts| alerts.iter().map(words).eq(wanted.iter().copied()))
        });
    }
}

#[test]
fn prometheus_scrapes_a_daemon_and_raises_alerts() {
    if lacks_prometheus() {
        return;
    }
    let (mount, dir) = (tempfile::tempdir().unwrap(), folder());
    let store = match LateStore::mount(mount.path(), 1 << 20) {
        Ok(store) => store,
        Err(lack) => return lack.skip(),
    };
    let at = format!("127.0.0.1:{}", free_port());
    let image = store.path().display().to_string();
    let args = [&image, "--socket", "s", "--control", "ctl", "--metrics", &at, "--queues", "1"];
    let hold = ["--cache", "none", "--on-write-error", "hold"];
    let _daemon = Daemon::serve(dir.path(), &[&args[..], &hold].concat());
    let prometheus = Prometheus::watch(dir.path(), &at);
    let is_one = |data: &Value| data["result"][0]["value"][1] == "1";
    prometheus.wait_for("/api/v1/query?query=up", &is_one);
    let serving = "/api/v1/query?query=ringway_disk_state%7Bstate=%22serving%22%7D";
    prometheus.wait_for(serving, &is_one);
    prometheus.wait_for_alerts(&[]);
    // The host's disk fails a write, which is held: told at once, and until the disk is mended.
    let mut device = Options::new().patience(PATIENCE).connect(dir.path().join("s")).unwrap();
    let mut queue = device.queue::<()>().unwrap();
    store.set_error(Some(libc::EIO));
    queue.write(0, device.pool().alloc(4096).unwrap(), ()).unwrap();
    queue.submit().unwrap();
    let disk = dir.path().join("s").canonicalize().unwrap().display().to_string();
    prometheus.wait_for_alerts(&[["RingwayRequestsHeld", &disk, "firing"]]);
    let ctl = |command: &str| {
        let mut ctl = ringway();
        ctl.args(["ctl", "--control", "ctl", command, "0"]).current_dir(dir.path());
        assert!(run(ctl).status.success());
    };
    store.set_error(None);
    ctl("retry");
    assert!(queue.wait(Some(PATIENCE)).unwrap());
    assert!(queue.pop().unwrap().unwrap().is_ok());
    prometheus.wait_for_alerts(&[]);
    // One that waits for its time first.
    ctl("pause");
    prometheus.wait_for_alerts(&[["RingwayDiskPaused", &disk, "pending"]]);
}

/// What a metric has to say after [`every_metric_has_a_value_or_a_reason`] has done its work.
enum Want {
    /// So much, of the series with these labels.
    Is(&'static str, f64),
    /// No less than the first, no more than the second, of all series with these labels together.
    Within(&'static str, f64, f64),
    /// Not looked at here, because of this.
    Not(&'static str),
}
use Want::{Is, Not, Within};

/// Each metric in the order of the list. A new one needs a row.
const WANTED: &[(&str, Want)] = &[
    ("ringway_build_info", Is("", 1.0)),
    ("ringway_scrape_seconds", Within("", 0.0, 60.0)),
    ("ringway_events_lost_total", Not("server/src/events.rs has a reader that stalls")),
    ("ringway_disk_info", Is("/plain\"", 1.0)),
    ("ringway_disk_size_bytes", Is("/plain\"", 1_048_576.0)),
    ("ringway_disk_state", Is("/plain\",state=\"serving\"", 1.0)),
    ("ringway_disk_connected", Is("/plain\"", 1.0)),
    ("ringway_disk_requests_total", Is("/plain\",operation=\"write\"", 10.0)),
    ("ringway_disk_bytes_total", Is("/plain\",operation=\"read\"", 2560.0)),
    ("ringway_disk_errors_total", Is("/fails\",kind=\"failed\"", 4.0)),
    ("ringway_disk_host_errors_total", Is("/fails\",operation=\"write\",error=\"io\"", 4.0)),
    ("ringway_disk_request_duration_seconds", Not("one of 61: metrics_say_what_has_happened")),
    ("ringway_disk_in_flight_requests", Is("/slow\"", 3.0)),
    ("ringway_disk_overdue_requests", Is("/slow\"", 3.0)),
    ("ringway_disk_overdue_total", Is("/slow\"", 3.0)),
    ("ringway_disk_held_requests", Is("/held\"", 2.0)),
    ("ringway_disk_held_total", Is("/held\"", 2.0)),
    ("ringway_disk_throttled_seconds_total", Within("/limited\"", 1e-6, 1e6)),
    ("ringway_disk_throttled_total", Within("/limited\"", 1.0, 6.0)),
    ("ringway_disk_limit", Is("/limited\",limit=\"iops\"", 1.0)),
    ("ringway_disk_limit_group_info", Is("/plain\",group=\"gold\"", 1.0)),
    ("ringway_limit_group_limit", Is("group=\"gold\",limit=\"bps\"", 1_073_741_824.0)),
    ("ringway_disk_batches_total", Within("/plain\"", 1.0, 17.0)),
    ("ringway_disk_queues", Is("/plain\"", 1.0)),
    ("ringway_disk_queue_depth", Is("/plain\"", 64.0)),
    ("ringway_disk_broken_queues", Is("/broken\"", 1.0)),
    ("ringway_disk_syncs_total", Is("/plain\"", 2.0)),
    ("ringway_disk_bounced_total", Not("disk/tests/hazards counts it; what files take differs")),
    ("ringway_disk_split_total", Not("disk/tests/hazards counts it; engines' limits differ")),
    ("ringway_disk_merged_total", Not("how many meet in a batch is up to the machine")),
    ("ringway_disk_merged_split_total", Not("the same; scheduler/src/scheduler/tests.rs")),
    ("ringway_disk_deadlines_total", Not("takes a disk that is busy for long: scheduler/tests")),
    ("ringway_disk_path", Is("/fails\",path=\"bio\"", 1.0)),
    ("ringway_disk_path_switches_total", Not("up to measured speed: scheduler/src/auto/tests.rs")),
    ("ringway_disk_not_polled", Is("/plain\"", 0.0)),
    ("ringway_disk_server_away", Is("/plain\"", 0.0)),
    ("ringway_disk_flushes_fail", Is("/plain\"", 0.0)),
    ("ringway_disk_recovered_requests_total", Is("/held\"", 2.0)),
    // One for each request at most, and a doorbell may be found rung once more when a queue begins.
    ("ringway_disk_kicks_total", Within("/plain\"", 1.0, 20.0)),
    ("ringway_disk_lost_kicks_total", Within("/quiet\"", 1.0, 10.0)),
    ("ringway_disk_calls_total", Is("/raw\"", 4.0)),
    ("ringway_disk_restarts_total", Is("/apart\"", 1.0)),
    ("ringway_worker_answers", Within("", 1.0, 100.0)),
    ("ringway_worker_seconds_total", Within("state=\"asleep\"", 1e-6, 1e6)),
    ("ringway_worker_queues", Within("", 7.0, 9.0)),
    ("ringway_worker_requests_total", Within("", 33.0, 47.0)),
    ("ringway_worker_operations_total", Within("", 17.0, 1e6)),
    ("ringway_worker_syscalls_total", Within("", 1.0, 1e6)),
    ("ringway_worker_turns_total", Within("", 17.0, 1e12)),
    ("ringway_worker_sleeps_total", Within("", 1.0, 1e9)),
    ("ringway_worker_lost_calls_total", Is("", 0.0)),
    ("ringway_worker_batch_requests", Not("its sum: metrics_say_what_has_happened")),
    ("ringway_worker_harvest_completions", Not("how many are found at once is up to the machine")),
    ("process_cpu_seconds_total", Within("", 1e-3, 1e6)),
    ("process_open_fds", Not("takes Linux 6.2")),
    ("process_max_fds", Within("", 10.0, 1e18)),
    ("process_virtual_memory_bytes", Within("", 1e6, 1e18)),
    ("process_resident_memory_bytes", Within("", 1e6, 1e15)),
    ("process_start_time_seconds", Within("", 1.7e9, 1e11)),
];

/// Why a metric is not as it has to be.
fn lacks(values: &BTreeMap<String, f64>, name: &str, want: &Want) -> Option<String> {
    let (labels, least, most) = match want {
        Is(labels, value) => (labels, value, value),
        Within(labels, least, most) => (labels, least, most),
        Not(why) => {
            assert!(!why.is_empty(), "{name}");
            return None;
        }
    };
    let its = |series: &str| series.split('{').next() == Some(name) && series.contains(labels);
    let its: Vec<_> = values.iter().filter(|(series, _)| its(series)).collect();
    let sum: f64 = its.iter().map(|(_, value)| **value).sum();
    (its.is_empty() || !(*least..=*most).contains(&sum)).then(|| format!("{name}: {its:?}"))
}

const DISKS: &str = "control = 'ctl'\nmetrics = 'unix:m'\noverdue = 1\n\
    [[limit-group]]\nname = 'gold'\nlimits = { bps = '1G' }\n\
    [[disk]]\nimage = 'disk.img'\nsocket = 'plain'\nqueues = 1\ncache = 'writeback'\nlimit-group = 'gold'\n\
    [[disk]]\nimage = 'null:1G,latency=3600000ms'\nsocket = 'slow'\nqueues = 1\n\
    [[disk]]\nimage = 'null:1G'\nsocket = 'limited'\nqueues = 1\nlimits = { iops = 1 }\n\
    [[disk]]\nimage = 'null:1G'\nsocket = 'raw'\nqueues = 1\n\
    [[disk]]\nimage = 'null:1G'\nsocket = 'quiet'\nqueues = 1\n\
    [[disk]]\nimage = 'null:1G'\nsocket = 'broken'\nqueues = 1\n\
    [[disk]]\nimage = 'null:1G'\nsocket = 'apart'\nqueues = 1\nisolate = true\n";

/// The file of [`DISKS`], and of two whose writes fail: one holds them.
fn disks(path: &Path, mounts: &[tempfile::TempDir; 2]) -> Option<Vec<LateStore>> {
    let mut config = DISKS.to_owned();
    let mut stores = Vec::new();
    for (mount, (socket, hold)) in mounts.iter().zip([("held", "hold"), ("fails", "report")]) {
        let store = match LateStore::mount(mount.path(), 1 << 20) {
            Ok(store) => store,
            Err(lack) => {
                lack.skip();
                return None;
            }
        };
        store.set_error(Some(libc::EIO));
        config += &format!(
            "[[disk]]\nimage = '{}'\nsocket = '{socket}'\nqueues = 1\ncache = 'none'\n\
             on-write-error = '{hold}'\n",
            store.path().display()
        );
        stores.push(store);
    }
    std::fs::write(path.join("c.toml"), config).unwrap();
    Some(stores)
}

fn connect(path: &Path, socket: &str) -> (Device, BlkQueue<()>) {
    let options = Options::new().patience(PATIENCE).reconnect(PATIENCE).queue_size(64);
    let mut device = options.connect(path.join(socket)).unwrap();
    let queue = device.queue::<()>().unwrap();
    (device, queue)
}

/// Waits until metrics are as they have to be.
fn until(path: &Path, what: &[(&str, Want)]) {
    let begun = Instant::now();
    loop {
        let values = scrape(path);
        let lacks: Vec<_> =
            what.iter().filter_map(|(name, want)| lacks(&values, name, want)).collect();
        if lacks.is_empty() {
            return;
        }
        assert!(begun.elapsed() < PATIENCE * 2, "{lacks:#?}");
    }
}

/// Ends the process of the disk that has one.
fn kill_apart(path: &Path) {
    let mut ctl = ringway();
    ctl.args(["ctl", "--control", "ctl", "--json", "list"]).current_dir(path);
    let list: Value = serde_json::from_slice(&run(ctl).stdout).unwrap();
    let its = list["disks"].as_array().unwrap().iter().find_map(|disk| disk["process"].as_i64());
    // SAFETY: a process of the daemon's, which was there a moment ago.
    assert_eq!(unsafe { libc::kill(its.unwrap().try_into().unwrap(), libc::SIGKILL) }, 0);
}

#[test]
fn every_metric_has_a_value_or_a_reason() {
    assert!(ALL.iter().map(|metric| metric.name).eq(WANTED.iter().map(|(name, _)| *name)));
    let (mounts, dir) = ([(); 2].map(|()| tempfile::tempdir().unwrap()), folder());
    let path = dir.path();
    let Some(_stores) = disks(path, &mounts) else { return };
    let serve = || Daemon::serve(path, &["--config", "c.toml"]);
    let daemon = serve();
    let (device, mut held) = connect(path, "held");
    for place in 0..2 {
        held.write(place * 8192, device.pool().alloc(4096).unwrap(), ()).unwrap();
    }
    held.submit().unwrap();
    until(path, &[("ringway_disk_held_requests", Is("/held\"", 2.0))]);
    daemon.kill();
    let _daemon = serve();

    let (plain, mut queue) = connect(path, "plain");
    for sector in 0..10 {
        assert!(write(&plain, &mut queue, sector, 7));
        if sector % 2 == 0 {
            read(&plain, &mut queue, sector);
        }
        if sector % 5 == 4 {
            queue.flush(()).unwrap();
            assert!(common::finish(&mut queue).0);
        }
    }
    let (failing, mut fails) = connect(path, "fails");
    for sector in 0..4 {
        assert!(!write(&failing, &mut fails, sector, 7));
    }
    let (slow, mut stuck) = connect(path, "slow");
    let (limited, mut waits) = connect(path, "limited");
    for place in 0..6 {
        waits.write(place * 8192, limited.pool().alloc(4096).unwrap(), ()).unwrap();
        if place < 3 {
            stuck.write(place * 8192, slow.pool().alloc(4096).unwrap(), ()).unwrap();
        }
    }
    waits.submit().unwrap();
    stuck.submit().unwrap();
    let guest = |socket| {
        let stream = UnixStream::connect(path.join(socket)).unwrap();
        RawGuest::start(stream, 1, 64, F_VERSION_1)
    };
    let (mut raw, mut quiet, mut broken) = (guest("raw"), guest("quiet"), guest("broken"));
    for _ in 0..4 {
        assert_eq!(raw.simple(0, 0, 0, DATA, 512).0, 0);
    }
    broken.set_avail_index(0, 5000);
    broken.kick(0);
    assert_eq!(quiet.simple(0, 0, 0, DATA, 512).0, 0);
    kill_apart(path);
    // By now the worker of the quiet guest sleeps.
    until(path, &[("ringway_disk_overdue_requests", Is("/slow\"", 3.0))]);
    // Unless it is awake for another disk just then.
    let lost = ("ringway_disk_lost_kicks_total", Within("/quiet\"", 1.0, 10.0));
    for _ in 0..10 {
        quiet.offer_quietly(0, 0);
        assert!(quiet.next_used(0, PATIENCE).is_some());
        if lacks(&scrape(path), lost.0, &lost.1).is_none() {
            break;
        }
    }
    until(path, WANTED);
}
