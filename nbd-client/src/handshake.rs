//! The handshake, as a client does it: fixed newstyle, `NBD_OPT_GO`, structured replies where the
//! server has them.

use ringway_nbd_words::{
    BASE_ALLOCATION, FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES, IHAVEOPT, NBDMAGIC, OLDSTYLE,
    OPTION_REPLY_MAGIC, PAYLOAD_MAX, answer, info, offers, option,
};
use std::io::{self, Read, Write};

/// The longest answer to an option that is read. Honest ones have a name and a description, 4096
/// bytes each at most.
const ANSWER_MAX: u32 = 16 << 10;

/// Answers to one option. Honest servers send fewer than ten.
const ANSWERS_MAX: u32 = 64;

/// The largest unit of requests that a disk can be made of: what guests know as a block.
const BLOCK_MAX: u32 = 4096;

/// What a server can offer, in words.
const ABILITIES: [(u16, &str); 9] = [
    (offers::READ_ONLY, "read-only"),
    (offers::SEND_FLUSH, "flush"),
    (offers::SEND_FUA, "fua"),
    (offers::SEND_TRIM, "trim"),
    (offers::SEND_WRITE_ZEROES, "write-zeroes"),
    (offers::SEND_FAST_ZERO, "fast-zero"),
    (offers::SEND_CACHE, "cache"),
    (offers::SEND_DF, "df"),
    (offers::CAN_MULTI_CONN, "multi-conn"),
];

/// What a server and this client have agreed upon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// The size of the export: at least a block. What a disk has of it are whole blocks.
    pub bytes: u64,
    /// What it offers (`NBD_FLAG_*`).
    pub flags: u16,
    /// Offsets and lengths are multiples of this, a power of two.
    pub min_block: u32,
    /// What it likes best.
    pub preferred_block: u32,
    /// The most bytes of a read or write.
    pub max_block: u32,
    /// Replies may be structured.
    pub structured: bool,
    /// The number by which the server calls `base:allocation`, if block status was agreed upon.
    pub block_status: Option<u32>,
}

/// What was agreed upon with a server, for as long as it is away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// What was agreed upon.
    pub negotiated: Negotiated,
    /// What the server called the export, if it told.
    pub export: Option<String>,
    /// How many connections there were.
    pub connections: u16,
}

impl Negotiated {
    /// What it offers, in words like those of `nbdinfo`.
    pub fn abilities(&self) -> impl Iterator<Item = &'static str> {
        let flags = self.flags;
        ABILITIES.into_iter().filter(move |(flag, _)| flags & flag != 0).map(|(_, name)| name)
    }

    /// True if the server offers all of this (`NBD_FLAG_*`).
    #[must_use]
    pub fn offers(&self, flags: u16) -> bool {
        self.flags & flags == flags
    }
}

/// Why there is no export.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// What the host says.
    #[error("the handshake ended: {0}")]
    Io(#[from] io::Error),
    /// No server of NBD, or one of those that this client does not know.
    #[error("{0}")]
    NoServer(&'static str),
    /// It refuses.
    #[error("{0}")]
    Refused(String),
    /// It breaks the rules.
    #[error("the server does not keep to the protocol: {0}")]
    Malformed(&'static str),
    /// It offers what no disk can be.
    #[error("{0}")]
    Unusable(String),
}

use HandshakeError::{Malformed, NoServer, Refused, Unusable};

/// Hears who the server is, and says who speaks.
///
/// # Errors
/// [`HandshakeError`]; the connection is of no use then.
pub(crate) fn greet(stream: &mut (impl Read + Write)) -> Result<(), HandshakeError> {
    if read_u64(stream)? != NBDMAGIC {
        return Err(NoServer("what listens there is no NBD server"));
    }
    match read_u64(stream)? {
        IHAVEOPT => {}
        OLDSTYLE => return Err(NoServer("the server speaks the oldstyle handshake only")),
        _ => return Err(NoServer("what listens there is no NBD server")),
    }
    let flags = read_u16(stream)?;
    if flags & FLAG_FIXED_NEWSTYLE == 0 {
        return Err(NoServer("the server does not speak the fixed newstyle handshake"));
    }
    let flags = flags & (FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES);
    Ok(stream.write_all(&u32::from(flags).to_be_bytes())?)
}

/// Agrees to go on within TLS, and nothing else.
///
/// # Errors
/// As [`greet`].
pub(crate) fn start_tls(stream: &mut (impl Read + Write)) -> Result<(), HandshakeError> {
    ask(stream, option::STARTTLS, &[])?;
    match take(stream, option::STARTTLS)? {
        (answer::ACK, data) if data.is_empty() => Ok(()),
        (answer::ACK, _) => Err(Malformed("an acknowledgement with data")),
        (kind, data) if kind & 1 << 31 != 0 => {
            let why = said(&data);
            Err(Refused(format!(
                "the server does not speak TLS{why}. Have it do so, or name it as nbd:// instead of nbds://"
            )))
        }
        _ => Err(Malformed("an answer of a kind that was not asked for")),
    }
}

/// Agrees upon an export, and upon block status if `block_status` says so and the server has it. Also what the
/// server calls the export, if it tells: that need not be what it was asked for.
///
/// # Errors
/// [`HandshakeError`]; the connection is of no use then.
pub(crate) fn agree(
    stream: &mut (impl Read + Write),
    export: &str,
    block_status: bool,
) -> Result<(Negotiated, Option<String>), HandshakeError> {
    let structured = offer(stream, option::STRUCTURED_REPLY)?;
    let context = if block_status && structured { set_meta_context(stream, export)? } else { None };
    let (negotiated, name) = go(stream, export, structured)?;
    Ok((Negotiated { block_status: context, ..negotiated }, name))
}

/// Selects `base:allocation`. Its number, or `None` from a server that has nothing to tell.
fn set_meta_context(
    stream: &mut (impl Read + Write),
    export: &str,
) -> Result<Option<u32>, HandshakeError> {
    let mut data = Vec::new();
    for (word, queries) in [(export, Some(1u32)), (BASE_ALLOCATION, None)] {
        let len = u32::try_from(word.len()).map_err(|_| Malformed("the name is too long"))?;
        data.extend_from_slice(&len.to_be_bytes());
        data.extend_from_slice(word.as_bytes());
        data.extend(queries.map(u32::to_be_bytes).into_iter().flatten());
    }
    ask(stream, option::SET_META_CONTEXT, &data)?;
    let mut context = None;
    for _ in 0..ANSWERS_MAX {
        match take(stream, option::SET_META_CONTEXT)? {
            (answer::ACK, _) => return Ok(context),
            (answer::META_CONTEXT, data) if context.is_none() => {
                let id = number(&data, 0, 4).and_then(|id| u32::try_from(id).ok());
                if data.get(4..) != Some(BASE_ALLOCATION.as_bytes()) {
                    return Err(Malformed("a metadata context that was not asked for"));
                }
                context = id;
            }
            (answer::META_CONTEXT, _) => return Err(Malformed("one metadata context twice")),
            // An export that is not there is told by the answer to NBD_OPT_GO.
            (kind, _) if kind & 1 << 31 != 0 => return Ok(None),
            _ => return Err(Malformed("an answer of a kind that was not asked for")),
        }
    }
    Err(Malformed("its answer has no end"))
}

/// Proposes what has no data. False if the server does not know it.
fn offer(stream: &mut (impl Read + Write), option: u32) -> Result<bool, HandshakeError> {
    ask(stream, option, &[])?;
    match take(stream, option)? {
        (answer::ACK, data) if data.is_empty() => Ok(true),
        (answer::ACK, _) => Err(Malformed("an acknowledgement with data")),
        (answer::ERR_TLS_REQD, _) => Err(wants_tls()),
        (kind, _) if kind & 1 << 31 != 0 => Ok(false),
        _ => Err(Malformed("an answer of a kind that was not asked for")),
    }
}

fn go(
    stream: &mut (impl Read + Write),
    export: &str,
    structured: bool,
) -> Result<(Negotiated, Option<String>), HandshakeError> {
    let name = u32::try_from(export.len()).map_err(|_| Malformed("the name is too long"))?;
    let mut data = name.to_be_bytes().to_vec();
    data.extend_from_slice(export.as_bytes());
    data.extend_from_slice(&2u16.to_be_bytes());
    data.extend_from_slice(&info::NAME.to_be_bytes());
    data.extend_from_slice(&info::BLOCK_SIZE.to_be_bytes());
    ask(stream, option::GO, &data)?;
    let (mut shape, mut blocks, mut called) = (None, (1, 4096, PAYLOAD_MAX), None);
    for _ in 0..ANSWERS_MAX {
        let (kind, data) = take(stream, option::GO)?;
        match kind {
            answer::ACK => {
                let (bytes, flags) = shape.ok_or(Malformed("it does not say how large it is"))?;
                return Ok((judge(bytes, flags, blocks, structured)?, called));
            }
            answer::INFO => match (number(&data, 0, 2), data.len()) {
                (Some(kind), 12) if kind == u64::from(info::EXPORT) => {
                    let flags = number(&data, 10, 2).unwrap_or(0);
                    shape = Some((number(&data, 2, 8).unwrap_or(0), narrow(flags)));
                }
                (Some(kind), 14) if kind == u64::from(info::BLOCK_SIZE) => {
                    let at = |at| u32::try_from(number(&data, at, 4).unwrap_or(0)).unwrap_or(0);
                    blocks = (at(2), at(6), at(10));
                }
                (Some(kind), _) if kind == u64::from(info::NAME) => {
                    called = Some(String::from_utf8_lossy(&data[2..]).into_owned());
                }
                (Some(kind), _)
                    if kind != u64::from(info::EXPORT) && kind != u64::from(info::BLOCK_SIZE) => {}
                _ => return Err(Malformed("what it says of the export has another length")),
            },
            answer::ERR_UNKNOWN => return Err(no_export(stream, export)),
            answer::ERR_TLS_REQD => return Err(wants_tls()),
            answer::ERR_UNSUP => return Err(NoServer("the server does not know NBD_OPT_GO")),
            kind if kind & 1 << 31 != 0 => {
                let why = said(&data);
                return Err(Refused(format!("the server refuses the export '{export}'{why}")));
            }
            _ => return Err(Malformed("an answer of a kind that was not asked for")),
        }
    }
    Err(Malformed("its answer has no end"))
}

/// With the names of those that there are, if it tells.
fn no_export(stream: &mut (impl Read + Write), export: &str) -> HandshakeError {
    let names = list(stream).unwrap_or_default();
    let which = match names.as_slice() {
        [] => String::new(),
        [name] if name.is_empty() => ". It has one without a name: leave the name out".into(),
        names => format!(". It has: {}", names.join(", ")),
    };
    Refused(format!("the server has no export '{export}'{which}"))
}

fn list(stream: &mut (impl Read + Write)) -> Result<Vec<String>, HandshakeError> {
    ask(stream, option::LIST, &[])?;
    let mut names = Vec::new();
    for _ in 0..ANSWERS_MAX {
        match take(stream, option::LIST)? {
            (answer::SERVER, data) => {
                let len = number(&data, 0, 4).and_then(|len| usize::try_from(len).ok());
                let name = len.and_then(|len| data.get(4..len.checked_add(4)?));
                names.push(format!("'{}'", printable(name.ok_or(Malformed("a short name"))?)));
            }
            _ => break,
        }
    }
    Ok(names)
}

/// Whether a disk can be made of it.
fn judge(
    bytes: u64,
    flags: u16,
    (min_block, preferred_block, max_block): (u32, u32, u32),
    structured: bool,
) -> Result<Negotiated, HandshakeError> {
    let unit = min_block.max(512);
    let sound = min_block.is_power_of_two()
        && preferred_block >= min_block
        && max_block >= preferred_block
        && flags & offers::HAS_FLAGS != 0;
    if !sound {
        return Err(Malformed("its block sizes or flags make no sense"));
    }
    if min_block > BLOCK_MAX {
        return Err(Unusable(format!(
            "the server takes blocks of {min_block} bytes only, and disks have {BLOCK_MAX} at most"
        )));
    }
    if bytes < unit.into() || bytes > i64::MAX.unsigned_abs() {
        return Err(Unusable(format!(
            "the export has {bytes} bytes, and a disk has {unit} at least, and less than 8 EiB"
        )));
    }
    let max_block = max_block.min(PAYLOAD_MAX) / unit * unit;
    if max_block == 0 {
        return Err(Unusable("the server takes less than a sector at a time".to_owned()));
    }
    let block_status = None;
    Ok(Negotiated { bytes, flags, min_block, preferred_block, max_block, structured, block_status })
}

fn wants_tls() -> HandshakeError {
    Refused(
        "the server wants TLS: name it as nbds://HOST/EXPORT?tls-certificates=/DIR (or nbds+unix://)"
            .to_owned(),
    )
}

fn ask(stream: &mut impl Write, option: u32, data: &[u8]) -> Result<(), HandshakeError> {
    let mut bytes = IHAVEOPT.to_be_bytes().to_vec();
    bytes.extend_from_slice(&option.to_be_bytes());
    let len = u32::try_from(data.len()).map_err(|_| Malformed("the name is too long"))?;
    bytes.extend_from_slice(&len.to_be_bytes());
    bytes.extend_from_slice(data);
    Ok(stream.write_all(&bytes)?)
}

/// One answer to an option: its kind, and what comes with it.
fn take(stream: &mut impl Read, option: u32) -> Result<(u32, Vec<u8>), HandshakeError> {
    if read_u64(stream)? != OPTION_REPLY_MAGIC {
        return Err(Malformed("an answer does not begin as one"));
    }
    if read_u32(stream)? != option {
        return Err(Malformed("an answer to what was not asked"));
    }
    let (kind, len) = (read_u32(stream)?, read_u32(stream)?);
    if len > ANSWER_MAX {
        return Err(Malformed("an answer is too long"));
    }
    let mut data = vec![0; len as usize];
    stream.read_exact(&mut data)?;
    Ok((kind, data))
}

/// What an error comes with, for people.
fn said(data: &[u8]) -> String {
    let text = printable(data);
    if text.is_empty() { text } else { format!(": {text}") }
}

/// What a server says, for people: not too long, and nothing that a terminal obeys.
pub(crate) fn printable(bytes: impl AsRef<[u8]>) -> String {
    let bytes = bytes.as_ref();
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(200)]);
    text.chars().filter(|letter| !letter.is_control()).collect()
}

/// The big-endian number of `len` bytes at `at`, if there are so many.
fn number(bytes: &[u8], at: usize, len: usize) -> Option<u64> {
    let bytes = bytes.get(at..at + len)?;
    Some(bytes.iter().fold(0, |number, &byte| number << 8 | u64::from(byte)))
}

fn narrow(number: u64) -> u16 {
    u16::try_from(number).unwrap_or(0)
}

fn read_u64(stream: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes).map(|()| u64::from_be_bytes(bytes))
}

fn read_u32(stream: &mut impl Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes).map(|()| u32::from_be_bytes(bytes))
}

fn read_u16(stream: &mut impl Read) -> io::Result<u16> {
    let mut bytes = [0; 2];
    stream.read_exact(&mut bytes).map(|()| u16::from_be_bytes(bytes))
}
