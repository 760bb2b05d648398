//! A client written from the text of the protocol, which can say what no honest one says.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// How replies look: `""`, structured, or with extended headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    structured: bool,
    extended: bool,
    /// Writes say that their length is that of their data, as they must with extended headers.
    says_payload: bool,
}

/// As in the beginning.
pub const SIMPLE: Mode = Mode { structured: false, extended: false, says_payload: false };
/// With structured replies.
pub const STRUCTURED: Mode = Mode { structured: true, extended: false, says_payload: false };
/// With extended headers.
pub const EXTENDED: Mode = Mode { structured: true, extended: true, says_payload: true };
/// The same, as QEMU's client does it since 8.2: no write has `NBD_CMD_FLAG_PAYLOAD_LEN`.
pub const QEMU: Mode = Mode { says_payload: false, ..EXTENDED };

/// What [`Client::reply`] says of a connection that has ended.
pub const CLOSED: Option<Reply> = None;

/// `NBD_CMD_*`
#[allow(missing_docs)]
pub mod command {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISC: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// `NBD_CMD_FLAG_*`
#[allow(missing_docs)]
pub mod flag {
    pub const FUA: u16 = 1;
    pub const NO_HOLE: u16 = 2;
    pub const DF: u16 = 4;
    pub const REQ_ONE: u16 = 8;
    pub const FAST_ZERO: u16 = 16;
    pub const PAYLOAD_LEN: u16 = 32;
}

/// One reply; its chunks are put together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// Of the request.
    pub cookie: u64,
    /// 0, or what went wrong.
    pub error: u32,
    /// Data that was read, or the payload of block status.
    pub data: Vec<u8>,
}

/// One connection.
#[derive(Debug)]
pub struct Client {
    /// The socket, for what has no function here.
    pub stream: UnixStream,
    mode: Mode,
    /// The size that was told.
    pub bytes: u64,
    /// The transmission flags that were told.
    pub flags: u16,
    /// Lengths of reads, by their cookies: simple replies do not tell.
    reads: std::collections::HashMap<u64, u32>,
}

impl Client {
    /// Agrees with a server upon `mode`, and upon block status if replies are structured.
    ///
    /// # Panics
    /// If the server does not agree.
    #[must_use]
    pub fn new(stream: UnixStream, mode: Mode) -> Self {
        Self::begin(stream, mode).expect("the server agrees")
    }

    /// The same.
    ///
    /// # Errors
    /// What the server says that refuses the export, or that it has ended the connection.
    ///
    /// # Panics
    /// If the server says what makes no sense.
    pub fn begin(stream: UnixStream, mode: Mode) -> Result<Self, String> {
        Self::shake_hands(stream, mode).unwrap_or_else(|| Err("it has ended".into()))
    }

    fn shake_hands(stream: UnixStream, mode: Mode) -> Option<Result<Self, String>> {
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a socket");
        let reads = std::collections::HashMap::new();
        let mut client = Self { stream, mode, bytes: 0, flags: 0, reads };
        let greeting = client.take(18)?;
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        client.send(&3u32.to_be_bytes());
        if mode.extended {
            client.option(11, &[]);
            assert_eq!(client.option_reply()?, (11, 1, Vec::new()));
        } else if mode.structured {
            client.option(8, &[]);
            assert_eq!(client.option_reply()?, (8, 1, Vec::new()));
        }
        if mode.structured {
            client.option(10, &query("disk", &["base:allocation"]));
            let (_, kind, data) = client.option_reply()?;
            assert_eq!((kind, &data[4..]), (4, &b"base:allocation"[..]));
            assert_eq!(client.option_reply()?.1, 1);
        }
        client.option(7, &[&4u32.to_be_bytes()[..], b"disk", &[0, 0]].concat());
        loop {
            let (option, kind, data) = client.option_reply()?;
            assert_eq!(option, 7);
            match kind {
                3 if data[..2] == [0, 0] => {
                    client.bytes = number(&data[2..10]);
                    client.flags = u16::from_be_bytes([data[10], data[11]]);
                }
                3 => {}
                1 => return Some(Ok(client)),
                kind if kind >> 31 == 1 => {
                    return Some(Err(String::from_utf8_lossy(&data).into_owned()));
                }
                other => panic!("an answer {other:#x}: {}", String::from_utf8_lossy(&data)),
            }
        }
    }

    /// Sends bytes; that nobody takes them is no failure of a test.
    pub fn send(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes);
    }

    /// The next `len` bytes; `None` at the end.
    pub fn take(&mut self, len: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; len];
        match self.stream.read_exact(&mut bytes) {
            Ok(()) => Some(bytes),
            Err(error) => {
                let timed_out = error.kind() == std::io::ErrorKind::WouldBlock;
                assert!(!timed_out, "the server says nothing");
                None
            }
        }
    }

    /// Asks for an option.
    pub fn option(&mut self, option: u32, data: &[u8]) {
        let len = u32::try_from(data.len()).expect("a short option");
        let head = [&b"IHAVEOPT"[..], &option.to_be_bytes(), &len.to_be_bytes(), data].concat();
        self.send(&head);
    }

    /// The next answer to one: its number, kind and data.
    ///
    /// # Panics
    /// If it does not begin as one.
    fn option_reply(&mut self) -> Option<(u32, u32, Vec<u8>)> {
        let head = self.take(20)?;
        assert_eq!(number(&head[..8]), 0x0003_e889_0455_65a9);
        let data = self.take(usize::try_from(number(&head[16..20])).expect("short"))?;
        // Four bytes each.
        #[allow(clippy::cast_possible_truncation)]
        Some((number(&head[8..12]) as u32, number(&head[12..16]) as u32, data))
    }

    /// Sends a request.
    pub fn ask(
        &mut self,
        kind: u16,
        flags: u16,
        cookie: u64,
        (offset, len): (u64, u32),
        data: &[u8],
    ) {
        if kind == command::READ {
            self.reads.insert(cookie, len);
        }
        let says = self.mode.says_payload && kind == command::WRITE;
        let paid = if says { flag::PAYLOAD_LEN } else { 0 };
        let head = request(self.mode, kind, flags | paid, cookie, (offset, len.into()));
        self.send(&head);
        self.send(data);
    }

    /// Sends a request and takes its reply, which must be the next one.
    ///
    /// # Panics
    /// If it is not.
    pub fn call(&mut self, kind: u16, flags: u16, range: (u64, u32), data: &[u8]) -> Reply {
        self.ask(kind, flags, 77, range, data);
        let reply = self.reply().expect("the connection goes on");
        assert_eq!(reply.cookie, 77);
        reply
    }

    /// The next reply; [`CLOSED`] at the end.
    ///
    /// # Panics
    /// If it does not follow the protocol.
    pub fn reply(&mut self) -> Option<Reply> {
        let magic = number(&self.take(4)?);
        if magic == 0x6744_6698 {
            assert!(!self.mode.extended, "a simple reply after extended headers");
            let rest = self.take(12)?;
            let (error, cookie) = (number(&rest[..4]), number(&rest[4..]));
            let error = u32::try_from(error).expect("four bytes");
            let len = self.reads.remove(&cookie);
            assert!(!self.mode.structured || len.is_none(), "a simple reply to a structured read");
            let data = match len {
                Some(len) if error == 0 => self.take(len as usize)?,
                _ => Vec::new(),
            };
            return Some(Reply { cookie, error, data });
        }
        self.chunk(magic)
    }

    fn chunk(&mut self, magic: u64) -> Option<Reply> {
        let extended = magic == 0x6e8a_278c;
        assert!(extended || magic == 0x668e_33ef, "a reply begins with {magic:#x}");
        assert_eq!(extended, self.mode.extended);
        let head = self.take(if extended { 28 } else { 16 })?;
        let (flags, kind, cookie) = (number(&head[..2]), number(&head[2..4]), number(&head[4..12]));
        let len = if extended { number(&head[20..28]) } else { number(&head[12..16]) };
        let payload = self.take(usize::try_from(len).expect("short"))?;
        assert_eq!(flags, 1, "one chunk answers all");
        let asked = self.reads.remove(&cookie);
        let (error, data) = match kind {
            0 => (0, Vec::new()),
            1 => (0, payload[8..].to_vec()),
            5 | 6 => (0, payload),
            0x8001 => (u32::try_from(number(&payload[..4])).expect("four bytes"), Vec::new()),
            other => panic!("a chunk of kind {other:#x}"),
        };
        if let Some(asked) = asked.filter(|_| error == 0) {
            assert_eq!(data.len(), asked as usize, "all of a read in one chunk");
        }
        Some(Reply { cookie, error, data })
    }
}

/// The head of a request.
#[must_use]
pub fn request(
    mode: Mode,
    kind: u16,
    flags: u16,
    cookie: u64,
    (offset, len): (u64, u64),
) -> Vec<u8> {
    let magic: u32 = if mode.extended { 0x21e4_1c71 } else { 0x2560_9513 };
    let mut head = magic.to_be_bytes().to_vec();
    head.extend_from_slice(&flags.to_be_bytes());
    head.extend_from_slice(&kind.to_be_bytes());
    head.extend_from_slice(&cookie.to_be_bytes());
    head.extend_from_slice(&offset.to_be_bytes());
    let len = len.to_be_bytes();
    head.extend_from_slice(if mode.extended { &len } else { &len[4..] });
    head
}

/// The extents of a payload of block status: lengths and flags.
#[must_use]
pub fn extents_of(mode: Mode, payload: &[u8]) -> Vec<(u64, u64)> {
    let (skip, half) = if mode.extended { (8, 8) } else { (4, 4) };
    let pairs = payload[skip..].chunks(2 * half);
    pairs.map(|pair| (number(&pair[..half]), number(&pair[half..]))).collect()
}

fn query(name: &str, queries: &[&str]) -> Vec<u8> {
    let text = |text: &str| {
        let len = u32::try_from(text.len()).expect("a short text");
        [&len.to_be_bytes()[..], text.as_bytes()].concat()
    };
    let count = u32::try_from(queries.len()).expect("a few");
    let mut data = [text(name), count.to_be_bytes().to_vec()].concat();
    queries.iter().for_each(|query| data.extend(text(query)));
    data
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, &byte| number << 8 | u64::from(byte))
}
