//! What a daemon in wrong hands gets by each message: the table of docs/sandbox.md.

use super::super::local::CloneWords;
use super::super::path_message::Name;
use super::super::protocol::OverlayWanted;
use super::super::state::StateDir;
use super::super::wire::receive;
use super::overlays::{put, take};
use super::*;
use ringway_control::config::FileIdentity;
use ringway_disk::open::unlock_image;
use ringway_disk::{OpenOptions, lock_image};
use ringway_testkit::{Need, skip};
use rustix::fs::Mode;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::time::Instant;
use tempfile::TempDir;

/// The table has each message, with tests that there are and that send it.
#[test]
fn e87_each_message_has_its_row_and_its_test() {
    let page = include_str!("../../../../docs/sandbox.md");
    let spawner = include_str!("../../isolate/spawner.rs");
    let tests = [
        include_str!("tests.rs"),
        include_str!("../local.rs"),
        include_str!("../../isolate/protocol.rs"),
        spawner,
        include_str!("../../../../ringway/tests/state.rs"),
    ]
    .concat();
    for (name, protocol, send) in [
        ("HelperRequest", include_str!("../protocol.rs"), include_str!("tests.rs")),
        ("SpawnerRequest", include_str!("../../isolate/spawner.rs"), spawner),
    ] {
        let (_, rest) = protocol.split_once(&format!("enum {name} {{\n")).expect("its messages");
        let (messages, _) = rest.split_once("\n}").unwrap();
        let messages = messages.lines().filter_map(|line| {
            let line = line.strip_prefix("    ")?;
            let word = line.split(|c: char| !c.is_ascii_alphanumeric()).next()?;
            word.starts_with(char::is_uppercase).then_some(word)
        });
        let title =
            if name == "HelperRequest" { "| to the helper |" } else { "| to the spawner |" };
        let (_, table) = page.split_once(title).expect("a table");
        let (table, _) = table.split_once("\n\n").unwrap();
        let rows: Vec<Vec<_>> =
            table.lines().skip(2).map(|row| row.split(" | ").collect()).collect();
        let messages: Vec<_> = messages.collect();
        assert!(messages.len() >= 4, "{messages:?}");
        for message in &messages {
            let its = rows.iter().find(|row| row[0].contains(&format!("`{message}`")));
            let row = its.unwrap_or_else(|| panic!("{name}::{message} has no row"));
            let named: Vec<_> = row[2].split('`').filter(|word| word.ends_with("_…")).collect();
            assert!(!named.is_empty(), "{message}: {row:?}");
            for test in named {
                let function = format!("fn {}", test.trim_end_matches('…'));
                assert!(tests.contains(&function), "{message}: there is no {test}");
            }
            assert!(send.contains(&format!("{name}::{message}")), "no test sends {message}");
        }
        let rows = rows.iter().map(|row| row[0].matches('`').count() / 2).sum::<usize>();
        assert_eq!(rows, messages.len(), "each row is of a message that there is");
    }
}

/// Anybody can have a descriptor that names a file, and pass it on.
#[test]
fn e28_an_image_that_is_only_named_gets_nothing() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let open = |flags| rustix::fs::open(file.path(), flags, Mode::empty()).unwrap();
    for flags in [OFlags::PATH, OFlags::PATH | OFlags::RDWR, OFlags::RDONLY] {
        let error = written(Some(open(flags))).unwrap_err().to_string();
        assert!(error.contains("not open for writing"), "{flags:?}: {error}");
    }
    assert!(written(None).is_err());
    assert!(
        written(Some(open(OFlags::RDWR))).is_ok() && written(Some(open(OFlags::WRONLY))).is_ok()
    );
}

/// A helper of root whose daemon has become `nobody`, and a folder that only root may enter.
struct Rig {
    helper: Helper,
    folder: TempDir,
}

impl Rig {
    fn new(adds: bool) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            skip(Need::Root, "to change the user");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let set = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        set(folder.path(), 0o755);
        let closed = folder.path().join("closed");
        std::fs::create_dir(&closed).unwrap();
        for (name, mode) in [("closed/image", 0o666), ("roots", 0o600), ("read", 0o644)] {
            std::fs::write(folder.path().join(name), vec![0; 1 << 20]).unwrap();
            set(&folder.path().join(name), mode);
        }
        set(&closed, 0o700);
        let duties = Duties {
            account: Some(Account::find("nobody").unwrap()),
            acts_for_it: false,
            adds,
            changes: false,
            groups: false,
            clones: false,
            iopoll: false,
            nvme: false,
            exports: Vec::new(),
            xen: None,
            configuration: Some(folder.path().join("roots")),
            state_dir: StateDir::open(Some(&folder.path().join("state"))).unwrap(),
        };
        let helper = Helper {
            local: Local::new(false),
            duties,
            addresses: Arc::new(
                Addresses::look_up(&[], |_| false, Sandbox::Off, (None, false)).unwrap(),
            ),
            started: true,
            remotes: Arc::default(),
            things: Arc::default(),
            steps: Arc::default(),
            look_ups: Arc::default(),
        };
        Some(Self { helper, folder })
    }

    fn path(&self, name: &str) -> Name {
        self.folder.path().join(name).as_path().into()
    }

    fn fd(&self, name: &str, flags: OFlags) -> OwnedFd {
        rustix::fs::open(self.folder.path().join(name), flags, Mode::empty()).unwrap()
    }

    /// What comes of a request, also on a line of its own.
    fn ask(&mut self, request: HelperRequest, fd: Option<OwnedFd>) -> Result<HelperAnswer, String> {
        let answered = self.helper.handle(request, fd).map_err(|error| in_full(&error))?;
        let answer = match answered {
            (HelperAnswer::Wait, Some(line)) => receive(&line).unwrap().0,
            (answer, _) => answer,
        };
        match answer {
            HelperAnswer::Refused { why, .. } => Err(why),
            answer => Ok(answer),
        }
    }

    #[track_caller]
    fn refuses(&mut self, request: HelperRequest, fd: Option<OwnedFd>, words: &str) {
        let asked = format!("{request:?}");
        let said = self.ask(request, fd).expect_err(&asked);
        assert!(said.contains(words), "{asked}: {said}");
    }

    fn open(&self, name: &str) -> HelperRequest {
        let options = OpenOptions::new(Source::Path(self.folder.path().join(name)));
        HelperRequest::Open(Box::new(
            Wanted::of(&options, (&CloneWords::default(), false)).unwrap(),
        ))
    }

    fn listen(&self, name: &str) -> HelperRequest {
        HelperRequest::Listen { path: self.path(name), private: false, mode: 0o666, group: None }
    }

    fn overlay(&self, name: &str) -> HelperRequest {
        HelperRequest::Overlay(Box::new(OverlayWanted {
            path: self.path(name),
            snapshot: self.path("snapshot"),
            format: "qcow2".into(),
            virtual_size: 1 << 20,
            cluster_bits: 16,
            direct: false,
        }))
    }
}

/// Images, sockets, paths and the configuration are what its user may reach.
#[test]
fn e37_what_has_a_name_is_reached_as_the_daemons_user() {
    let Some(mut rig) = Rig::new(true) else { return };
    rig.refuses(rig.open("roots"), None, "ermission");
    let hidden = rig.open("closed/image");
    assert!(rig.ask(hidden, None).is_err());
    rig.refuses(rig.listen("socket"), None, "ermission");
    assert!(!rig.folder.path().join("socket").exists());
    rig.refuses(HelperRequest::Configuration, None, "ermission");
    let hidden = rig.path("closed/image");
    let Ok(HelperAnswer::Located(location)) = rig.ask(HelperRequest::Locate { path: hidden }, None)
    else {
        panic!("it says nothing")
    };
    assert!(matches!(location.identity(), FileIdentity::Path(_)), "{location:?}");
    let holder = HelperRequest::Holder { path: rig.path("closed/image"), read_only: false };
    assert!(matches!(rig.ask(holder, None), Ok(HelperAnswer::Holder(None))));
    // What its user may not write is not opened for writing, whoever has a descriptor of it.
    let file = rig.fd("read", OFlags::RDONLY);
    let request = HelperRequest::Writable { name: rig.path("read"), base: None };
    assert!(rig.ask(request, Some(file)).is_err());
    // A new image is made where its user may make one.
    let (request, image) = (rig.overlay("read"), rig.fd("read", OFlags::RDWR));
    assert!(rig.ask(request, Some(image)).is_err());
    assert!(!rig.folder.path().join("snapshot").exists());
    rig.refuses(rig.overlay("read"), Some(rig.fd("read", OFlags::RDONLY)), "open for writing");
}

/// What is kept of a disk is given to who can write its image, and by numbers there is only what was made for this
/// daemon.
#[test]
fn e38_states_and_files_are_those_of_this_daemon() {
    let Some(mut rig) = Rig::new(true) else { return };
    let cached = HelperRequest::State { cached: true };
    rig.refuses(cached, Some(rig.fd("read", OFlags::RDONLY)), "open for writing");
    let request = HelperRequest::StateOfExport { name: Path::new("nbd:unix:/n").into() };
    rig.refuses(request, None, "no such export");
    let none = || HelperRequest::StateFollows { number: 9 };
    rig.refuses(none(), Some(rig.fd("read", OFlags::RDWR)), "no such state");
    rig.refuses(none(), Some(rig.fd("read", OFlags::RDONLY)), "open for writing");
    let watches = || HelperRequest::StateWatches { number: 9 };
    rig.refuses(watches(), Some(rig.fd("read", OFlags::RDWR)), "no such state");
    rig.refuses(watches(), Some(rig.fd("read", OFlags::RDONLY)), "open for writing");
    rig.refuses(HelperRequest::StateSettled { number: 9, follows: true }, None, "no such state");
    rig.refuses(HelperRequest::Stateless { number: 9 }, None, "no such state");
    rig.refuses(HelperRequest::NameOverlay { number: 9 }, None, "no image 9");
    rig.refuses(HelperRequest::EndOverlay { number: 9, kept: true }, None, "no image 9");
    rig.refuses(HelperRequest::Remove { number: 9 }, None, "no file 9");
    assert!(rig.ask(HelperRequest::Keep { number: 9 }, None).is_ok(), "there is nothing to keep");
    // The page is named after the image, and is root's.
    let image = Some(rig.fd("read", OFlags::RDWR));
    let Ok(HelperAnswer::State { number }) = rig.ask(HelperRequest::State { cached: true }, image)
    else {
        panic!("there is no page")
    };
    let pages = std::fs::read_dir(rig.folder.path().join("state")).unwrap();
    let pages: Vec<_> = pages.map(|page| page.unwrap()).collect();
    let inode = rig.folder.path().join("read").metadata().unwrap().ino();
    assert_eq!(pages.len(), 1);
    assert!(pages[0].file_name().to_string_lossy().contains(&format!("-{inode:x}-")));
    let meta = pages[0].metadata().unwrap();
    assert_eq!((meta.uid(), meta.mode() & 0o777), (0, 0o600));
    assert!(rig.ask(HelperRequest::Stateless { number }, None).is_ok());
}

/// A daemon to which no disks are added has all that it needs.
#[test]
fn e39_who_adds_no_disks_opens_nothing_after_the_start() {
    let Some(mut rig) = Rig::new(false) else { return };
    let without = "started without --control";
    rig.refuses(rig.open("read"), None, without);
    rig.refuses(rig.listen("socket"), None, without);
    rig.refuses(rig.overlay("read"), Some(rig.fd("read", OFlags::RDWR)), without);
    let request = HelperRequest::Writable { name: rig.path("read"), base: None };
    rig.refuses(request, Some(rig.fd("read", OFlags::RDONLY)), without);
    // It cannot go back to before the start.
    assert!(rig.ask(HelperRequest::Started, None).is_ok());
    assert!(rig.helper.account().is_some());
}

/// What a daemon to which no disks are added may still ask for is there from the start.
#[test]
fn e52_connections_are_made_anew_and_guests_of_xen_served_only_as_at_the_start() {
    let Some(mut rig) = Rig::new(false) else { return };
    #[cfg(feature = "xen")]
    rig.refuses(HelperRequest::Xen(crate::xen::Named::Store), None, "no guests of Xen");
    let name = |name: &str| format!("nbd:unix:{}/{name}", rig.folder.path().display());
    let open = |name: &str, again| {
        let options = OpenOptions::new(Source::Nbd(name.parse().unwrap()));
        HelperRequest::Open(Box::new(
            Wanted::of(&options, (&CloneWords::default(), again)).unwrap(),
        ))
    };
    let (one, other) = (name("one"), name("other"));
    rig.helper.remotes.lock().unwrap().insert(one.clone().into_bytes(), one.clone());
    for again in [false, true] {
        rig.refuses(open(&other, again), None, "started without --control");
        let why = rig.ask(open(&one, again), None).expect_err("nobody listens there");
        assert!(!why.contains("--control"), "{why}");
    }
}

/// What is kept of an export is another daemon's, unless this one could connect to it.
#[test]
fn e78_asking_for_an_export_does_not_give_what_is_kept_of_it() {
    let Some(mut rig) = Rig::new(true) else { return };
    let name = format!("nbd:unix:{}/none", rig.folder.path().display());
    let options = OpenOptions::new(Source::Nbd(name.parse().unwrap()));
    for started in [false, true] {
        rig.helper.started = started;
        let wanted = Wanted::of(&options, (&CloneWords::default(), false)).unwrap();
        assert!(rig.ask(HelperRequest::Open(Box::new(wanted)), None).is_err(), "nobody listens");
        let request = HelperRequest::StateOfExport { name: Path::new(&name).into() };
        rig.refuses(request, None, "no such export");
    }
}

/// It connects to an export of its own by a link, which leads to another daemon's afterwards.
#[test]
fn e89_a_link_that_leads_elsewhere_later_gives_nothing_of_another_export() {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;
    let Some(mut rig) = Rig::new(true) else { return };
    let folder = rig.folder.path().to_path_buf();
    let all = std::fs::Permissions::from_mode(0o777);
    for name in ["own", "victim"] {
        std::fs::create_dir(folder.join(name)).unwrap();
    }
    let listener = UnixListener::bind(folder.join("own/n.sock")).unwrap();
    std::fs::set_permissions(folder.join("own/n.sock"), all).unwrap();
    // As a server does that has an export of 1 MiB.
    let server = std::thread::spawn(move || {
        let (mut line, _) = listener.accept().unwrap();
        line.write_all(b"NBDMAGICIHAVEOPT\0\x03").unwrap();
        line.read_exact(&mut [0; 4]).unwrap();
        loop {
            let mut head = [0; 16];
            if line.read_exact(&mut head).is_err() {
                return;
            }
            let len = u32::from_be_bytes(head[12..].try_into().unwrap());
            std::io::copy(&mut (&line).take(len.into()), &mut std::io::sink()).unwrap();
            let answer = |kind: u32, data: &[u8]| {
                let len = u32::try_from(data.len()).unwrap();
                let head = [&0x0003_e889_0455_65a9u64.to_be_bytes()[..], &head[8..12]].concat();
                let rest = [&kind.to_be_bytes()[..], &len.to_be_bytes(), data].concat();
                (&line).write_all(&[head, rest].concat()).unwrap();
            };
            // NBD_OPT_GO; nothing else is offered.
            if head[8..12] == [0, 0, 0, 7] {
                let export = [&[0, 0][..], &(1u64 << 20).to_be_bytes(), &[0, 1]].concat();
                answer(3, &export);
                answer(1, &[]);
            } else {
                answer(0x8000_0001, &[]);
            }
        }
    });
    let link = folder.join("link");
    std::os::unix::fs::symlink("own", &link).unwrap();
    let name = format!("nbd:unix:{}/n.sock", link.display());
    let options = OpenOptions::new(Source::Nbd(name.parse().unwrap()));
    let wanted = Wanted::of(&options, (&CloneWords::default(), false)).unwrap();
    let opened = rig.ask(HelperRequest::Open(Box::new(wanted)), None);
    assert!(matches!(opened, Ok(HelperAnswer::Opened { .. })), "{opened:?}");
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink("victim", &link).unwrap();
    let request = HelperRequest::StateOfExport { name: Path::new(&name).into() };
    assert!(matches!(rig.ask(request, None), Ok(HelperAnswer::State { .. })));
    let page = |name: &str| {
        let socket = folder.join(name).join("n.sock");
        let what = identity(format!("nbd:unix:{}", socket.display()).as_bytes());
        folder.join("state").join(StateName::of_export(&what).to_string())
    };
    assert!(page("own").exists() && !page("victim").exists());
    drop(rig);
    let _ = server.join();
}

/// A note that an image was served is forgotten for who had that image opened, and for nobody else.
#[test]
fn e77_a_note_is_forgotten_for_who_had_the_image_opened() {
    let Some(mut rig) = Rig::new(true) else { return };
    let (shared, state) = (rig.folder.path().join("shared"), rig.folder.path().join("state"));
    std::fs::create_dir(&shared).unwrap();
    std::fs::set_permissions(&shared, std::fs::Permissions::from_mode(0o777)).unwrap();
    let notes = || std::fs::read_dir(&state).unwrap().count();
    let mut options = OpenOptions::new(Source::Path(shared.join("new")));
    (options.raw, options.create_bytes) = (true, Some(1 << 20));
    let wanted = Wanted::of(&options, (&CloneWords::default(), false)).unwrap();
    let opened = rig.ask(HelperRequest::Open(Box::new(wanted)), None);
    let Ok(HelperAnswer::Opened { new: Some(number), .. }) = opened else { panic!("{opened:?}") };
    assert!(rig.ask(HelperRequest::Keep { number }, None).is_ok());
    assert_eq!(notes(), 1);
    let forget = |name| HelperRequest::Forget { path: shared.join(name).as_path().into() };
    assert!(rig.ask(forget("other"), None).is_ok());
    // One of another daemon that it may not have.
    let path = rig.folder.path().join("closed/none");
    let real = Location::of(&path).real().to_owned();
    let name = StateName::served_image(real.as_os_str().as_bytes()).to_string();
    std::fs::write(state.join(name), real.as_os_str().as_bytes()).unwrap();
    options.source = Source::Path(path.clone());
    let wanted = Wanted::of(&options, (&CloneWords::default(), false)).unwrap();
    assert!(rig.ask(HelperRequest::Open(Box::new(wanted)), None).is_err());
    assert!(rig.ask(HelperRequest::Forget { path: path.as_path().into() }, None).is_ok());
    assert_eq!(notes(), 2, "nothing was opened");
    // Another daemon's helper, with the same folder.
    let its = std::mem::take(&mut rig.helper.local.served);
    assert!(rig.ask(forget("new"), None).is_ok());
    assert_eq!(notes(), 2, "it was not opened for that one");
    rig.helper.local.served = its;
    assert!(rig.ask(forget("new"), None).is_ok());
    assert_eq!(notes(), 1);
}

/// Records of rings have numbers for names, and are in the folder of the start; a link there leads nowhere.
#[cfg(feature = "xen")]
#[test]
fn e61_what_guests_of_xen_need_is_in_the_folder_of_records() {
    use ringway_xen_blkback::{Here, Named, RecordName};
    let Some(mut rig) = Rig::new(false) else { return };
    let folder = rig.folder.path().to_path_buf();
    let records = folder.join("records");
    std::fs::create_dir(&records).unwrap();
    let fd = rig.fd("records", OFlags::RDONLY);
    rig.helper.duties.xen = Some(Here::new(Some(folder.join("no-store")), fd));
    let name = RecordName { domid: u16::MAX, devid: u32::MAX, queue: u32::MAX };
    let file = records.join(name.to_string());
    std::os::unix::fs::symlink("../roots", &file).unwrap();
    let before = std::fs::read(folder.join("roots")).unwrap();
    assert!(rig.ask(HelperRequest::Xen(Named::LeftRecord(name)), None).is_err());
    assert!(rig.ask(HelperRequest::Xen(Named::NewRecord(name, 1 << 40)), None).is_err());
    let made = rig.ask(HelperRequest::Xen(Named::NewRecord(name, 4096)), None);
    assert!(matches!(made, Ok(HelperAnswer::Named { there: true })), "{made:?}");
    let meta = file.symlink_metadata().unwrap();
    assert!(meta.is_file() && meta.mode() & 0o777 == 0o600, "a record of its own");
    assert!(rig.ask(HelperRequest::Xen(Named::EndedRecord(name)), None).is_ok());
    assert_eq!(std::fs::read_dir(&records).unwrap().count(), 0);
    assert_eq!(std::fs::read(folder.join("roots")).unwrap(), before);
    // The store is that of the start, with no word of whoever asks.
    assert!(rig.ask(HelperRequest::Xen(Named::Store), None).is_err());
}

/// The file system of one image hangs; and what is being left is taken up again when that is over.
#[test]
fn e60_others_are_heard_while_a_state_waits_for_its_image() {
    let Some(mut rig) = Rig::new(true) else { return };
    let state = || HelperRequest::State { cached: false };
    let image = Some(rig.fd("read", OFlags::RDWR));
    let Ok(HelperAnswer::State { number }) = rig.ask(state(), image) else { panic!("no page") };
    let keeper = Arc::clone(&lock(&rig.helper.things).states[&number].0);
    let hangs = lock_keeper(&keeper);
    let settled = HelperRequest::StateSettled { number, follows: true };
    let Ok((HelperAnswer::Wait, Some(line))) = rig.helper.handle(settled, None) else {
        panic!("it is done at once")
    };
    let other = Some(rig.fd("closed/image", OFlags::RDWR));
    assert!(matches!(rig.ask(state(), other), Ok(HelperAnswer::State { .. })));
    let name = hangs.names()[0];
    drop(hangs);
    assert!(matches!(receive(&line).unwrap().0, HelperAnswer::Done));
    lock(&rig.helper.things).leaving.push((0, name));
    let image = Some(rig.fd("read", OFlags::RDWR));
    let Ok((HelperAnswer::Wait, Some(line))) = rig.helper.handle(state(), image) else {
        panic!("it is taken up while it is left")
    };
    assert!(rig.ask(HelperRequest::Stateless { number }, None).is_ok());
    lock(&rig.helper.things).leaving.clear();
    assert!(matches!(receive(&line).unwrap().0, HelperAnswer::State { .. }));
}

/// A disk is left whose image hangs, and whose daemon has no descriptor for the line.
#[test]
fn e74_a_state_that_cannot_be_left_is_asked_for_again_and_keeps_nobody_waiting() {
    let Some(mut rig) = Rig::new(true) else { return };
    let image = Some(rig.fd("read", OFlags::RDWR));
    let Ok(HelperAnswer::State { number }) = rig.ask(HelperRequest::State { cached: false }, image)
    else {
        panic!("no page")
    };
    let keeper = Arc::clone(&lock(&rig.helper.things).states[&number].0);
    let hangs = lock_keeper(&keeper);
    let mut stateless = || rig.helper.handle(HelperRequest::Stateless { number }, None);
    assert!(matches!(stateless(), Ok((HelperAnswer::Wait, Some(_)))));
    assert!(matches!(stateless(), Ok((HelperAnswer::Wait, None))), "it is not left");
    drop(hangs);
    let begun = std::time::Instant::now();
    let said = loop {
        match stateless() {
            Ok(_) => assert!(begun.elapsed() < Duration::from_secs(30), "it is left"),
            Err(error) => break in_full(&error),
        }
    };
    assert!(said.contains("no such state"), "{said}");
}

/// Each path that is looked up waits for a file system that hangs.
#[test]
fn e34_a_file_that_finds_no_room_to_go_stays_to_be_removed() {
    let Some(mut rig) = Rig::new(true) else { return };
    let socket = rig.folder.path().join("closed/socket");
    rig.helper.started = false;
    let listen = rig.listen("closed/socket");
    let Ok(HelperAnswer::Listening { number, .. }) = rig.ask(listen, None) else {
        panic!("it does not listen")
    };
    rig.helper.started = true;
    let under_way = vec![Arc::clone(&rig.helper.look_ups); LOOK_UPS_MAX];
    rig.refuses(HelperRequest::Remove { number }, None, "are being looked up");
    assert!(socket.exists());
    drop(under_way);
    assert!(rig.ask(HelperRequest::Remove { number }, None).is_ok());
    assert!(!socket.exists());
    rig.refuses(HelperRequest::Remove { number }, None, "no file");
}

impl Rig {
    /// Answers a request on a line of its own, with a file.
    fn file(&mut self, request: HelperRequest, fd: Option<OwnedFd>) -> (HelperAnswer, File) {
        let (HelperAnswer::Wait, Some(line)) = self.helper.handle(request, fd).unwrap() else {
            panic!("it is answered at once")
        };
        let (answer, file) = receive(&line).unwrap();
        (answer, File::from(file.expect("a file")))
    }

    /// Somebody else asks for the lock of the image that has this name.
    fn takes(&self, name: &str) -> Option<File> {
        let file = File::open(self.folder.path().join(name)).unwrap();
        lock_image(&file, false).is_ok().then_some(file)
    }

    /// The lock is free, or will be once a process that another test has started runs its own program.
    #[track_caller]
    fn takes_soon(&self, name: &str) -> File {
        let begun = Instant::now();
        loop {
            match self.takes(name) {
                Some(file) => return file,
                None => assert!(begun.elapsed() < Duration::from_secs(60), "{name} is locked"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// A new image on top of `open/image`, both locked by a daemon that dies then.
    fn overlay_of_a_dead_daemon(&mut self) -> u64 {
        let fd = File::from(self.fd("open/image", OFlags::RDWR));
        lock_image(&fd, false).unwrap();
        let request = HelperRequest::Overlay(Box::new(OverlayWanted {
            path: self.path("open/image"),
            snapshot: self.path("open/snapshot"),
            format: "qcow2".into(),
            virtual_size: 1 << 20,
            cluster_bits: 16,
            direct: false,
        }));
        let (HelperAnswer::Overlay { number, .. }, new) = self.file(request, Some(fd.into()))
        else {
            panic!("there is no image")
        };
        lock_image(&new, false).unwrap();
        number
    }
}

/// The daemon dies while its helper names files of a snapshot: its successor gets neither before that is over.
#[test]
fn c110_an_image_is_locked_until_its_names_are_settled() {
    let Some(mut rig) = Rig::new(true) else { return };
    let open = rig.folder.path().join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o777)).unwrap();
    let old = || {
        let _ = std::fs::remove_file(open.join("snapshot"));
        std::fs::write(open.join("image"), vec![0; 1 << 20]).unwrap();
        std::fs::set_permissions(open.join("image"), std::fs::Permissions::from_mode(0o666))
            .unwrap();
        open.join("image").metadata().unwrap().ino()
    };
    let names = || std::fs::read_dir(&open).unwrap().count();
    let inode = |name: &str| open.join(name).metadata().unwrap().ino();
    // It is not named yet; it is; it was not served, after all.
    for step in 0..3 {
        let image = old();
        let number = rig.overlay_of_a_dead_daemon();
        assert!(rig.takes("open/image").is_none(), "step {step}");
        if step > 0 {
            rig.ask(HelperRequest::NameOverlay { number }, None).unwrap();
            assert_eq!((inode("snapshot"), names()), (image, 2));
            assert!(rig.takes("open/image").is_none() && rig.takes("open/snapshot").is_none());
        }
        if step == 2 {
            rig.ask(HelperRequest::EndOverlay { number, kept: false }, None).unwrap();
            assert_eq!((inode("image"), names()), (image, 1));
        } else {
            rig.helper.end();
            assert_eq!((inode("image") == image, names()), (step == 0, 1 + step));
        }
        rig.takes_soon("open/image");
        lock(&rig.helper.things).ended = false;
    }
    // It is being named when the daemon dies.
    let image = old();
    let number = rig.overlay_of_a_dead_daemon();
    let mut under_way = take(&rig.helper.things, number).unwrap();
    rig.helper.end();
    assert!(rig.takes("open/image").is_none());
    under_way.take_name().unwrap();
    assert!(rig.takes("open/image").is_none() && rig.takes("open/snapshot").is_none());
    put(&rig.helper.things, number, under_way);
    drop((rig.takes_soon("open/image"), rig.takes_soon("open/snapshot")));
    assert_eq!((inode("snapshot"), names()), (image, 2), "what has its name stays");
}

/// The daemon dies before it has started: what it has made goes before its lock does, and stays if somebody else has
/// that.
#[test]
fn c111_a_new_image_is_removed_under_its_lock() {
    let Some(mut rig) = Rig::new(true) else { return };
    rig.helper.started = false;
    let path = rig.folder.path().join("new");
    for is_taken in [false, true] {
        let mut options = OpenOptions::new(Source::Path(path.clone()));
        options.create_bytes = Some(1 << 20);
        let request = HelperRequest::Open(Box::new(
            Wanted::of(&options, (&CloneWords::default(), false)).unwrap(),
        ));
        let (HelperAnswer::Opened { new: Some(_), .. }, file) = rig.file(request, None) else {
            panic!("it is not new")
        };
        let theirs = if is_taken {
            // As a daemon does that hands it over.
            unlock_image(&file);
            drop(file);
            Some(rig.takes_soon("new"))
        } else {
            lock_image(&file, false).unwrap();
            drop(file);
            assert!(rig.takes("new").is_none(), "somebody else serves what is about to be removed");
            None
        };
        rig.helper.end();
        assert_eq!(path.exists(), is_taken);
        drop(theirs);
        lock(&rig.helper.things).ended = false;
    }
}
