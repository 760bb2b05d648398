//! The way to an image, in two steps: what reads files, and what speaks with the cluster. A process that is to
//! lose its files takes the second one afterwards; the library's threads begin there.

use crate::error::{RbdError, os};
use crate::image::{Image, Opened};
use crate::key;
use crate::library::Library;
use crate::lock;
use crate::owner::Myself;
use crate::target::Target;
use crate::within::within;
use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

/// How long monitors may take to answer.
const CONNECT: u64 = 15;
/// How long anything else may take, until the image is open.
const STEP: Duration = Duration::from_secs(30);

/// As whom, and by which configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// The configuration file of the cluster; without it where Ceph looks for it.
    pub conf: Option<PathBuf>,
    /// The user, without `client.`; without it `admin`.
    pub user: Option<String>,
}

/// What is set, whatever the configuration says.
///
/// What is answered has to be in the cluster: a process that is killed would take a cache with it, and its
/// guest, which does not notice, would flush in vain. Log and admin socket would be files.
const SETTINGS: [(&CStr, &CStr); 13] = [
    (c"rbd_cache", c"false"),
    (c"rbd_persistent_cache_mode", c"disabled"),
    (c"rbd_parent_cache_enabled", c"false"),
    (c"rbd_blocklist_on_break_lock", c"true"),
    (c"rbd_non_blocking_aio", c"true"),
    (c"client_mount_timeout", c"15"),
    (c"admin_socket", c""),
    (c"log_file", c""),
    (c"log_to_stderr", c"false"),
    (c"err_to_stderr", c"false"),
    (c"log_to_syslog", c"false"),
    (c"err_to_syslog", c"false"),
    (c"crash_dir", c""),
];

/// All that has to be read from files is read.
#[derive(Debug)]
pub struct Configured {
    opened: Opened,
    target: Target,
    user: String,
    myself: Myself,
    /// A key was found.
    has_key: bool,
}

impl Configured {
    /// Loads the library, reads the configuration and the key. Starts no thread.
    ///
    /// # Errors
    /// [`RbdError`]: that one of them is not to be had.
    pub fn new(target: &Target, access: &Access) -> Result<Self, RbdError> {
        let library = Library::load()?;
        let id = access.user.as_deref().unwrap_or("admin");
        let id = id.strip_prefix("client.").unwrap_or(id);
        let mut cluster = ptr::null_mut();
        let word = text(id);
        // SAFETY: the name ends with a zero; the handle is written to where it says.
        let rc = unsafe { (library.rados_create)(&raw mut cluster, word.as_ptr()) };
        RbdError::check(rc, "prepare a connection to the cluster")?;
        let (io, image) = (ptr::null_mut(), ptr::null_mut());
        let opened = Opened { library, cluster, io, image };
        let (target, user) = (target.clone(), format!("client.{id}"));
        let mut configured = Self { opened, target, user, myself: Myself::new(), has_key: false };
        configured.read(access)?;
        for (name, value) in SETTINGS {
            // One that this version does not have cannot do harm.
            configured.set(name, value);
        }
        configured.has_key = configured.find_key();
        Ok(configured)
    }

    fn read(&self, access: &Access) -> Result<(), RbdError> {
        let path = access.conf.as_ref().map(|path| text(path.as_os_str().as_bytes()));
        let word = path.as_ref().map_or(ptr::null(), |path| path.as_ptr());
        // SAFETY: the path ends with a zero; none at all has the library look for the file.
        let rc = unsafe { (self.opened.library.rados_conf_read_file)(self.opened.cluster, word) };
        if rc >= 0 {
            return Ok(());
        }
        let file = access
            .conf
            .as_ref()
            .map_or("/etc/ceph/ceph.conf".to_owned(), |path| path.display().to_string());
        let hint = match rc.saturating_neg() {
            libc::ENOENT => "Name it: --ceph-conf FILE",
            libc::EINVAL => "It is not one of Ceph",
            _ => "Whoever starts the daemon has to be able to read it",
        };
        Err(RbdError::Configuration { file, source: os(rc), hint })
    }

    fn set(&self, name: &CStr, value: &CStr) {
        // SAFETY: both end with a zero.
        unsafe {
            (self.opened.library.rados_conf_set)(self.opened.cluster, name.as_ptr(), value.as_ptr())
        };
    }

    fn get(&self, name: &CStr) -> String {
        let mut value = vec![0u8; 4096];
        // SAFETY: at most so many bytes are written, a zero at the end included.
        let rc = unsafe {
            let buffer = value.as_mut_ptr().cast();
            (self.opened.library.rados_conf_get)(self.opened.cluster, name.as_ptr(), buffer, 4096)
        };
        let text = CStr::from_bytes_until_nul(&value).ok().filter(|_| rc >= 0);
        text.map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Has the library know the key of the user, if there is one.
    fn find_key(&self) -> bool {
        if !self.get(c"key").is_empty() {
            return true;
        }
        let keyrings = self.get(c"keyring");
        let keyrings =
            keyrings.split([',', ';', ' ']).map(str::trim).filter(|path| !path.is_empty());
        let mut rings = keyrings.filter_map(|path| std::fs::read_to_string(path).ok());
        let found = rings.find_map(|ring| key::of(&self.user, &ring)).or_else(|| {
            let file = self.get(c"keyfile");
            std::fs::read_to_string(file).ok().map(|key| key.trim().to_owned())
        });
        let Some(key) = found else { return false };
        self.set(c"key", &text(key));
        true
    }

    /// Connects, opens the image, and takes its lock if it may be written; waits for whoever has the lock for
    /// as long as `lock_wait`. Whatever the cluster does not answer has a bound.
    ///
    /// # Errors
    /// [`RbdError`]. After [`RbdError::Silent`] a thread of the library still waits: the process should end.
    pub fn open(
        mut self,
        read_only: bool,
        lock_wait: Option<Duration>,
    ) -> Result<Arc<Image>, RbdError> {
        let read_only = read_only || self.target.snapshot.is_some();
        self = within("to connect", STEP, move || self.connect())??;
        let mut opened = within("to open the image", STEP, move || self.open_image(read_only))??;
        if !read_only {
            let (image, myself) = (Arc::new(opened.opened), opened.myself);
            lock::take(&image, &opened.target.to_string(), &myself, lock_wait)?;
            opened.opened = Arc::into_inner(image).ok_or_else(|| RbdError::Silent {
                step: "to take the lock",
                seconds: STEP.as_secs(),
            })?;
            return Image::new(opened.opened, opened.target, read_only);
        }
        Image::new(opened.opened, opened.target, read_only)
    }

    fn connect(self) -> Result<Self, RbdError> {
        // SAFETY: it is configured, and not connected.
        let rc = unsafe { (self.opened.library.rados_connect)(self.opened.cluster) };
        if rc >= 0 {
            return Ok(self);
        }
        let cephx = self.get(c"auth_client_required").contains("cephx");
        let why = match rc.saturating_neg() {
            libc::ETIMEDOUT => format!(
                "no monitor has answered within {CONNECT} s ({}). Are the addresses those of this \
                 cluster?",
                self.get(c"mon_host")
            ),
            _ if cephx && !self.has_key => {
                format!("no key of {} is in {}", self.user, self.get(c"keyring"))
            }
            libc::EACCES | libc::EPERM => "the key is not that of this user".to_owned(),
            libc::ENOENT if self.get(c"mon_host").is_empty() => {
                "the configuration names no monitors (mon host)".to_owned()
            }
            _ => format!(
                "{}. Monitors ({}) are named by their addresses, names are not looked up",
                os(rc),
                self.get(c"mon_host")
            ),
        };
        Err(RbdError::Connect { user: self.user.clone(), why })
    }

    fn open_image(mut self, read_only: bool) -> Result<Self, RbdError> {
        let library = self.opened.library;
        let pool = text(&self.target.pool);
        // SAFETY: the cluster is connected, the name ends with a zero.
        let rc = unsafe {
            (library.rados_ioctx_create)(
                self.opened.cluster,
                pool.as_ptr(),
                &raw mut self.opened.io,
            )
        };
        match rc.saturating_neg() {
            libc::ENOENT => return Err(RbdError::NoPool(self.target.pool.clone())),
            libc::EPERM | libc::EACCES => return Err(self.refused("see the pool")),
            _ => RbdError::check(rc, "open the pool")?,
        }
        if !self.target.namespace.is_empty() {
            let namespace = text(&self.target.namespace);
            // SAFETY: as above.
            unsafe { (library.rados_ioctx_set_namespace)(self.opened.io, namespace.as_ptr()) };
        }
        let image = text(&self.target.image);
        let snapshot = self.target.snapshot.as_deref().map(text);
        let snapshot = snapshot.as_ref().map_or(ptr::null(), |name| name.as_ptr());
        let open = if read_only { library.rbd_open_read_only } else { library.rbd_open };
        // SAFETY: the pool is open, the names end with zeroes.
        let rc =
            unsafe { open(self.opened.io, image.as_ptr(), &raw mut self.opened.image, snapshot) };
        match rc.saturating_neg() {
            libc::ENOENT => {
                let (name, pool) = (&self.target.image, self.target.pool.clone());
                let what = match &self.target.snapshot {
                    Some(snapshot) => format!("image '{name}' with a snapshot '{snapshot}'"),
                    None => format!("image '{name}'"),
                };
                return Err(RbdError::NoImage { pool, what });
            }
            libc::EPERM | libc::EACCES => return Err(self.refused("open the image")),
            _ => RbdError::check(rc, "open the image")?,
        }
        if !read_only {
            self.opened.check_writable()?;
        }
        Ok(self)
    }

    fn refused(&self, what: &'static str) -> RbdError {
        RbdError::Permission { user: self.user.clone(), what }
    }
}

/// With a zero at its end; names of images were looked at before, and others have none within.
fn text(word: impl AsRef<[u8]>) -> CString {
    CString::new(word.as_ref()).unwrap_or_default()
}
