//! Requests from arbitrary bytes: mostly well formed, with mistakes anywhere.
//!
//! [`check`] is one function for two uses: the corpus test below, and the target `control` of
//! cargo-fuzz.

use super::{COMMANDS, ControlRequest, parse};
use crate::protocol::ProblemKind;
use serde_json::{Map, Value, json};

/// Names of fields, of a request and of a disk within one.
const FIELDS: [&str; 9] =
    ["disk", "disk", "disk", "size", "shrink", "buckets", "id", "version", "fail"];
const DISK_FIELDS: [&str; 25] = [
    "on-read-error",
    "on-write-error",
    "on-enospc",
    "hold-timeout",
    "reconnect-timeout",
    "response-timeout",
    "image",
    "image",
    "image",
    "socket",
    "socket",
    "size",
    "read-only",
    "serial",
    "block-size",
    "lock-wait",
    "queues",
    "queue-size",
    "engine",
    "cache",
    "path",
    "socket-mode",
    "socket-group",
    "isolate",
    "read_only",
];
const WORDS: [&str; 24] = [
    "",
    "0",
    "/srv/vm1.img",
    "/srv/vm1.img",
    "/run/vm1.sock",
    "disk.img",
    "null:1G",
    "null:1G,latency=2ms",
    "sim:ssd:1G",
    "sim:tape:",
    "null:",
    "10G",
    "4K",
    "1.5T",
    "auto",
    "threads",
    "io_uring",
    "linux-aio",
    "none",
    "writeback",
    "request",
    "é\u{0}\n",
    "99999999999999999999",
    "list",
];

/// What became of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A request, with nothing left to be judged but what the disks are.
    Good,
    /// A problem of this kind.
    Refused(ProblemKind),
}

/// The choices that are left; 0 once they have run out.
struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    fn pick<'b>(&mut self, words: &[&'b str]) -> &'b str {
        words[usize::from(self.byte()) % words.len()]
    }

    fn number(&mut self) -> Value {
        match self.byte() {
            choice @ 0..160 => json!(choice % 5),
            choice @ 160..220 => json!(1u64 << (choice % 64)),
            220..230 => json!(-1),
            230..240 => json!(u64::MAX),
            _ => json!(1.5),
        }
    }

    /// A value that mostly suits the field.
    fn value(&mut self, field: &str, depth: u8) -> Value {
        if self.byte() >= 232 {
            return self.any(depth);
        }
        match field {
            "shrink" | "buckets" | "read-only" | "isolate" | "fail" => json!(self.byte() & 1 != 0),
            "version" => json!(u8::from(self.byte() < 240)),
            "queues" | "lock-wait" | "hold-timeout" | "reconnect-timeout" | "response-timeout" => {
                json!(1 + self.byte() % 9)
            }
            "queue-size" => json!(4u32 << (self.byte() % 15)),
            "block-size" => json!(512 << (self.byte() % 5)),
            "image" => json!(self.pick(&["/srv/vm2.img", "/dev/vg0/vm1", "null:1G", "sim:hdd:1G"])),
            "socket" => json!(self.pick(&["/run/vm2.sock", "/run/vm3.sock"])),
            "size" => match self.byte() {
                0..128 => json!(self.pick(&["10G", "64K", "1.5T", "512"])),
                _ => self.number(),
            },
            "engine" => json!(self.pick(&["auto", "threads", "io_uring", "linux-aio"])),
            "cache" => json!(self.pick(&["none", "writeback", "writethrough"])),
            "socket-mode" => json!(self.pick(&["0600", "660", "0666", "0444"])),
            "socket-group" => json!(self.pick(&["0", "36", "kvm"])),
            "path" => json!(self.pick(&["auto", "bio", "request"])),
            "on-read-error" | "on-write-error" | "on-enospc" => {
                json!(self.pick(&["report", "hold"]))
            }
            "serial" | "disk" => match self.byte() {
                0..100 => self.number(),
                _ => json!(self.pick(&WORDS)),
            },
            _ => self.any(depth),
        }
    }

    fn any(&mut self, depth: u8) -> Value {
        match self.byte() % 8 {
            0 => Value::Null,
            1 => json!(self.byte() & 1 != 0),
            2 | 3 => self.number(),
            4 | 5 => json!(self.pick(&WORDS)),
            6 if depth > 0 => (0..self.byte() % 4).map(|_| self.any(depth - 1)).collect(),
            _ if depth > 0 => Value::Object(self.object(&DISK_FIELDS, depth - 1)),
            _ => Value::Null,
        }
    }

    fn object(&mut self, fields: &[&str], depth: u8) -> Map<String, Value> {
        let mut object = Map::new();
        for _ in 0..self.byte() % 8 {
            let field = self.pick(fields);
            let value = self.value(field, depth);
            object.insert(field.into(), value);
        }
        object
    }

    /// A request.
    fn line(&mut self) -> Vec<u8> {
        let command = match self.byte() {
            choice @ 0..240 => COMMANDS[usize::from(choice) % COMMANDS.len()],
            _ => self.pick(&WORDS),
        };
        // Mostly the fields that the command has.
        let mut request = match (self.byte(), command) {
            (0..200, "list" | "events" | "reload") => Map::new(),
            (0..200, "stats") => {
                let buckets = self.value("buckets", 1);
                Map::from_iter([("buckets".into(), buckets)])
            }
            (0..200, "add") => {
                let mut disk = self.object(&DISK_FIELDS, 1);
                for field in ["image", "socket"] {
                    let value = self.value(field, 1);
                    disk.entry(field).or_insert(value);
                }
                Map::from_iter([("disk".into(), disk.into())])
            }
            (0..200, "resize") => {
                let (disk, size) = (self.value("disk", 1), self.value("size", 1));
                Map::from_iter([("disk".into(), disk), ("size".into(), size)])
            }
            (0..200, _) => {
                let disk = self.value("disk", 1);
                Map::from_iter([("disk".into(), disk)])
            }
            _ => self.object(&FIELDS, 3),
        };
        if self.byte() < 248 {
            request.insert("command".into(), command.into());
        }
        if self.byte() & 1 != 0 {
            let id = self.any(2);
            request.insert("id".into(), id);
        }
        let mut line = serde_json::to_vec(&request).expect("JSON");
        // Anything at all, in the middle of it.
        if self.byte() >= 224 {
            for _ in 0..self.byte() % 4 {
                let at = usize::from(self.byte()) % line.len();
                line[at] = self.byte();
            }
            line.truncate(line.len() - usize::from(self.byte() / 64) % line.len());
        }
        line
    }
}

/// Reads the request that `data` describes, or `data` itself if it begins with a brace. Panics if
/// what comes out is neither a request that says the same once more nor a problem with a message.
pub fn check(data: &[u8]) -> Outcome {
    let line = if data.starts_with(b"{") { data.to_vec() } else { Choices(data).line() };
    let text = String::from_utf8_lossy(&line);
    let (id, request) = parse(&line);
    let request = match request {
        Ok(request) => request,
        Err(problem) => {
            assert!(!problem.message.is_empty(), "{text}");
            let kinds = [ProblemKind::Malformed, ProblemKind::Version, ProblemKind::UnknownCommand];
            assert!(kinds.contains(&problem.kind), "{:?}: {text}", problem.kind);
            return Outcome::Refused(problem.kind);
        }
    };
    // What was understood, said in our words, is understood in the same way.
    let mut said = serde_json::to_value(&request).expect("JSON");
    let fields = said.as_object_mut().expect("a request is an object");
    let before = fields.clone();
    // Numbers with a point may come back with another last digit.
    let id = id.filter(is_exact);
    if let Some(id) = &id {
        fields.insert("id".into(), id.clone());
    }
    let (id_again, again) = parse(&serde_json::to_vec(fields).expect("JSON"));
    let again = again.unwrap_or_else(|problem| panic!("{}: {text}", problem.message));
    assert_eq!(id_again, id, "{text}");
    assert_eq!(serde_json::to_value(again).expect("JSON"), Value::Object(before), "{text}");
    if let ControlRequest::Add(disk) = request {
        match disk.into_spec() {
            Ok(spec) => {
                assert!((1..=256).contains(&spec.queues), "{text}");
                let size = spec.queue_size;
                assert!((4..=32768).contains(&size) && size.is_power_of_two(), "{text}");
            }
            Err(problem) => {
                assert!(
                    problem.kind == ProblemKind::Malformed && !problem.message.is_empty(),
                    "{text}"
                );
                return Outcome::Refused(problem.kind);
            }
        }
    }
    Outcome::Good
}

fn is_exact(value: &Value) -> bool {
    match value {
        Value::Number(number) => !number.is_f64(),
        Value::Array(values) => values.iter().all(is_exact),
        Value::Object(fields) => fields.values().all(is_exact),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_fuzz_corpus_of_requests_passes() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/control");
        let mut files: Vec<_> =
            std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        assert!(files.len() >= 20, "the corpus has only {} files", files.len());
        for file in files {
            println!("{}", file.display());
            check(&std::fs::read(&file).unwrap());
        }
    }

    #[test]
    fn requests_are_mostly_valid() {
        let mut random = 0x9e37_79b9_7f4a_7c15u64;
        let mut byte = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random.to_le_bytes()[4]
        };
        let (mut good, mut refused) = (0, Vec::new());
        for _ in 0..4000 {
            let data: Vec<u8> = (0..64).map(|_| byte()).collect();
            match check(&data) {
                Outcome::Good => good += 1,
                Outcome::Refused(kind) => refused.push(kind),
            }
        }
        let of = |kind| refused.iter().filter(|&&other| other == kind).count();
        let [malformed, version, unknown] =
            [ProblemKind::Malformed, ProblemKind::Version, ProblemKind::UnknownCommand].map(of);
        println!("{good} good, {malformed} malformed, {version} versions, {unknown} unknown");
        assert!(good > 1000 && malformed > 500 && version > 20 && unknown > 50);
    }

    /// What a client may say in many ways is one request.
    #[test]
    fn a_request_is_what_it_says() {
        let line = br#"{"version":1,"id":[7],"command":"resize","disk":"vm","size":"1K"}"#;
        let (id, request) = parse(line);
        let said = serde_json::to_value(request.ok().unwrap()).unwrap();
        assert_eq!(id, Some(json!([7])));
        let want = json!({"command": "resize", "disk": "vm", "size": 1024, "shrink": false});
        assert_eq!(said, want);
        for (line, kind) in [
            (&b"[]"[..], ProblemKind::Malformed),
            (br#"{"command":"list","disk":0}"#, ProblemKind::Malformed),
            (br#"{"command":7}"#, ProblemKind::Malformed),
            (br#"{"command":"list","version":2}"#, ProblemKind::Version),
            (br#"{"command":"List"}"#, ProblemKind::UnknownCommand),
        ] {
            assert_eq!(parse(line).1.err().unwrap().kind, kind);
        }
    }
}
