// Reads rows of a kvemb table over plain sockets. What every step means: docs/storage-format.md. How to build and run it: ../README.md.
import java.io.*;
import java.net.*;
import java.nio.*;
import java.nio.charset.StandardCharsets;
import java.util.*;
import org.bouncycastle.crypto.digests.Blake2bDigest;

public class Reader {
    static final String ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    static final String LOST_NODE = "lost node", STALE_MAP = "stale map", WRONG_RECORD = "wrong record";
    static final Map<String, Integer> CODES = Map.of(LOST_NODE, 3, STALE_MAP, 4, WRONG_RECORD, 5);

    static class Failure extends RuntimeException {
        final String why;
        Failure(String why, String format, Object... values) { super(String.format(format, values)); this.why = why; }
    }

    // --- msgpack. A value is null, Boolean, Long (its bits), Double, String, byte[], List<Item> or Map<String, Item>; raw: its bytes.
    record Item(Object value, byte[] raw, int head) {
        @SuppressWarnings("unchecked") List<Item> list() { return (List<Item>) value; }
        @SuppressWarnings("unchecked") Item get(String name) { return ((Map<String, Item>) value).get(name); }
        Item at(int index) { return list().get(index); }
        long number() { return (Long) value; }
        String text() { return (String) value; }
        byte[] bytes() { return (byte[]) value; }
        byte[] body() { return Arrays.copyOfRange(raw, head, raw.length); }
    }

    static final String KINDS = "0?ttbbb???ffiiiiiiii?????sssaamm", WIDTHS = "00001240004812481248000001242424"; // of heads from 0xc0 to 0xdf

    static Item unpack(ByteBuffer in) {
        int begin = in.position(), c = in.get() & 255;
        char kind = c < 0x80 || c >= 0xe0 ? 'i' : c < 0x90 ? 'm' : c < 0xa0 ? 'a' : c < 0xc0 ? 's' : KINDS.charAt(c - 0xc0);
        long n = c < 0x80 || c >= 0xe0 ? (byte) c : c < 0xa0 ? c & 15 : c & 31;
        if (c >= 0xc0 && c < 0xe0) {
            n = 0;
            for (int width = WIDTHS.charAt(c - 0xc0) - '0'; width > 0; width--) n = n << 8 | in.get() & 255;
        }
        int head = in.position() - begin;
        Object value = null;
        switch (kind) {
            case 'i' -> value = n;
            case 'f' -> value = Double.longBitsToDouble(n);
            case 't' -> value = c == 0xc3;
            case 's', 'b' -> {
                byte[] data = new byte[Math.min((int) n, in.remaining() + 1)];
                in.get(data);
                value = kind == 'b' ? data : new String(data, StandardCharsets.UTF_8);
            }
            case 'a' -> {
                List<Item> list = new ArrayList<>();
                for (; n > 0; n--) list.add(unpack(in));
                value = list;
            }
            case 'm' -> {
                Map<String, Item> map = new HashMap<>();
                for (; n > 0; n--) map.put(unpack(in).text(), unpack(in));
                value = map;
            }
            case '?' -> throw new Failure(WRONG_RECORD, "a value of the cluster is of another release");
        }
        return new Item(value, Arrays.copyOfRange(in.array(), begin, in.position()), head);
    }

    static Item decode(byte[] data, String magic, int least, int most) {
        try {
            Item it = unpack(ByteBuffer.wrap(data));
            if (it.at(0).text().equals(magic) && it.at(1).number() >= least && it.at(1).number() <= most) return it;
        } catch (BufferUnderflowException | ClassCastException | IndexOutOfBoundsException e) { // said below
        }
        throw new Failure(WRONG_RECORD, "%s: damaged, or of another release", magic);
    }

    static byte[] joined(Object... parts) { // bytes, a text as msgpack, or an int that is one byte
        ByteArrayOutputStream out = new ByteArrayOutputStream();
        for (Object part : parts) {
            if (part instanceof String text) out.write(0xa0 | text.length());
            if (part instanceof Integer one) out.write(one);
            else out.writeBytes(part instanceof String text ? text.getBytes(StandardCharsets.UTF_8) : (byte[]) part);
        }
        return out.toByteArray();
    }

    static byte[] packed(long value) {
        if (value < 128) return new byte[] {(byte) value};
        int width = value < 256 ? 1 : value < 65536 ? 2 : value < 1L << 32 ? 4 : 8;
        byte[] all = ByteBuffer.allocate(8).putLong(value).array();
        return joined(0xcc + Integer.numberOfTrailingZeros(width), Arrays.copyOfRange(all, 8 - width, 8));
    }

    static long digest64(Object... parts) { // text, bytes, and integers from 0 to 127
        Blake2bDigest digest = new Blake2bDigest(512);
        for (Object part : parts) {
            byte[] data = part instanceof String text ? text.getBytes(StandardCharsets.UTF_8) : part instanceof Long n ? packed(n) : (byte[]) part;
            digest.update((byte) (part instanceof String ? 's' : part instanceof Long ? 'i' : 'b'));
            digest.update(ByteBuffer.allocate(8).order(ByteOrder.LITTLE_ENDIAN).putLong(data.length).array(), 0, 8);
            digest.update(data, 0, data.length);
        }
        byte[] out = new byte[64];
        digest.doFinal(out, 0);
        return little(out).getLong(0);
    }

    static ByteBuffer little(byte[] data) { return ByteBuffer.wrap(data).order(ByteOrder.LITTLE_ENDIAN); }

    static long mix64(long z) {
        z = (z ^ z >>> 30) * 0xbf58476d1ce4e5b9L;
        z = (z ^ z >>> 27) * 0x94d049bb133111ebL;
        return z ^ z >>> 31;
    }

    static String three(long n) { return "" + ALPHABET.charAt((int) (n >> 12 & 63)) + ALPHABET.charAt((int) (n >> 6 & 63)) + ALPHABET.charAt((int) (n & 63)); }

    static final String[] SLOT_TAGS = new String[16384]; // of every slot the first text of three characters that CRC16 puts there
    static {
        for (int n = (1 << 18) - 1; n >= 0; n--) {
            String tag = three(n);
            int crc = 0;
            for (int bit = 0; bit < 24; bit++)
                crc = crc << 1 & 0xffff ^ (((crc >> 15 ^ tag.charAt(bit / 8) >> 7 - bit % 8) & 1) == 1 ? 0x1021 : 0);
            SLOT_TAGS[crc % 16384] = tag;
        }
    }

    static class Table {
        final String tag, dtype;
        final int bits, dim, width, sizeBytes; // bits of the number of buckets; weights of a row, bytes of a weight and of a record
        final long checkKey, schema;

        Table(Item d) {
            if (d.get("num_ids") != null) throw new Failure(WRONG_RECORD, "the table has num_ids: its rows lie in pages, which this program does not read");
            Item optimizer = d.get("optimizer"), kind = optimizer.get("kind"), initializer = d.get("initializer"), transforms = optimizer.get("transforms");
            byte[] algorithm = d.get("init_algorithm") == null ? packed(1) : d.get("init_algorithm").raw;
            byte[] buckets = d.get("n_buckets") == null ? packed(256) : d.get("n_buckets").raw, options = {}, kinds = {};
            int n = 0, state = Map.of("sgd", 0, "adagrad", 1, "rmsprop", 1).getOrDefault(kind.text(), 2);
            for (String name : List.of("momentum", "nesterov", "amsgrad", "centered", "initial_accumulator_value")) {
                Item value = optimizer.get(name);
                if (value == null) continue;
                boolean set = name.equals("momentum") ? (Double) value.value > 0 : Boolean.TRUE.equals(value.value);
                if (set && !name.equals("nesterov")) state++;
                options = joined(options, name, name.equals("momentum") ? new byte[] {(byte) (set ? 0xc3 : 0xc2)} : value.raw);
                n++;
            }
            for (Item one : transforms == null ? List.<Item>of() : transforms.list()) kinds = joined(kinds, one.get("kind").raw);
            Map<String, byte[]> made = new HashMap<>();
            made.put("optimizer", joined(0x83, "kind", kind.raw, "options", 0x80 | n, options, "transforms", 0x90 | (transforms == null ? 0 : transforms.list().size()), kinds));
            made.put("initializer", joined(initializer.raw[0] + 1, initializer.body(), "algorithm", algorithm));
            made.put("n_buckets", buckets);
            byte[] pairs = {};
            n = 0;
            for (String name : List.of("name", "dim", "dtype", "id_dtype", "optimizer", "initializer", "seed", "reduce", "life", "n_buckets")) {
                byte[] raw = made.containsKey(name) ? made.get(name) : d.get(name) == null ? null : d.get(name).raw;
                if (raw == null) continue;
                pairs = joined(pairs, name, raw);
                n++;
            }
            schema = digest64("schema", joined(0x80 | n, pairs)) & 255;
            checkKey = digest64("id check", d.get("name").text());
            tag = three(digest64("table tag", d.get("name").text(), d.get("tag_attempt").number()) >>> 46);
            bits = Long.numberOfTrailingZeros(unpack(ByteBuffer.wrap(buckets)).number());
            dim = (int) d.get("dim").number();
            dtype = d.get("dtype").text();
            width = dtype.equals("float32") ? 4 : 2;
            sizeBytes = 12 + dim * width + 4 * (kind.text().equals("rowwise_adagrad") ? 1 : dim * state);
        }

        long bucket(long id) { return bits == 0 ? 0 : mix64(id) >>> 64 - bits; }
        int slot(long bucket) { return (int) (bits <= 14 ? bucket << 14 - bits : bucket >>> bits - 14); }
        byte[] key(long bucket) {
            String sub = bits <= 14 ? "" : three(bucket & (1L << bits - 14) - 1);
            return (tag + "{" + SLOT_TAGS[slot(bucket)] + "}" + sub).getBytes(StandardCharsets.US_ASCII);
        }
        String row(ByteBuffer record) { // its float32 values, least significant byte first
            StringBuilder out = new StringBuilder();
            for (int i = 0, at = 12; i < dim; i++, at += width) {
                int word = width == 4 ? record.getInt(at) : record.getShort(at) & 0xffff;
                if (dtype.equals("bfloat16")) word <<= 16;
                if (dtype.equals("float16")) {
                    int exponent = word >> 10 & 31, fraction = word & 1023;
                    float value = exponent == 31 ? fraction > 0 ? Float.NaN : Float.POSITIVE_INFINITY
                        : exponent > 0 ? Math.scalb(1024f + fraction, exponent - 25) : Math.scalb((float) fraction, -24);
                    word = Float.floatToRawIntBits(value) | word >> 15 << 31;
                }
                out.append(String.format("%08x", Integer.reverseBytes(word)));
            }
            return out.toString();
        }
    }

    static class Node {
        final String address;
        final ByteArrayOutputStream asked = new ByteArrayOutputStream();
        Socket socket = new Socket();
        DataInputStream in;
        byte[] info, marker, map, tables;
        Exception error;

        Node(String address, long patienceMs) { // marker, map and registry are read, and judged where they are used
            this.address = address;
            try {
                int colon = address.lastIndexOf(':');
                socket.connect(new InetSocketAddress(address.substring(0, colon), Integer.parseInt(address.substring(colon + 1))), (int) patienceMs);
                socket.setTcpNoDelay(true);
                in = new DataInputStream(new BufferedInputStream(socket.getInputStream()));
                ask("INFO", "server");
                for (String name : List.of("marker", "map", "tables")) ask("GET", "kvemb:" + name);
                send();
                info = reply(patienceMs);
                marker = reply(patienceMs);
                map = reply(patienceMs);
                tables = reply(patienceMs);
            } catch (IOException e) {
                error = e;
            }
        }
        void ask(Object... words) {
            asked.writeBytes(("*" + words.length + "\r\n").getBytes());
            for (Object word : words) {
                byte[] data = word instanceof String text ? text.getBytes() : (byte[]) word;
                asked.writeBytes(("$" + data.length + "\r\n").getBytes());
                asked.writeBytes(data);
                asked.writeBytes("\r\n".getBytes());
            }
        }
        void send() throws IOException {
            asked.writeTo(socket.getOutputStream());
            asked.reset();
        }
        byte[] reply(long patienceMs) throws IOException { // null: there is no such value
            socket.setSoTimeout((int) Math.max(1, patienceMs));
            StringBuilder line = new StringBuilder();
            for (int c; (c = in.readUnsignedByte()) != '\n'; ) line.append((char) c);
            if (line.charAt(0) != '$') throw new IOException(line.toString().strip());
            int n = Integer.parseInt(line.substring(1).strip());
            byte[] data = n < 0 ? null : in.readNBytes(n);
            if (n >= 0 && in.skipBytes(2) != 2) throw new EOFException();
            return data;
        }
    }

    final String[] seeds;
    final String name;
    final Map<String, Node> nodes = new LinkedHashMap<>();
    final int[] owners = new int[16384];
    final Set<String> placements = new HashSet<>(); // serial and digest
    Item map, identity; // identity: a marker of the cluster
    Table table;
    long deadlineMs;

    Reader(String seeds, String name) { this.seeds = seeds.split(","); this.name = name; }

    long leftMs() { return Math.max(1, deadlineMs - System.nanoTime() / 1000000); }

    void forget() {
        for (Node node : nodes.values()) {
            try {
                node.socket.close();
            } catch (IOException e) { // it is not used any more
            }
        }
        nodes.clear();
    }

    // A node that hangs leaves time for the others.
    Node opened(String address) { return nodes.computeIfAbsent(address, a -> new Node(a, leftMs() / 2 + 1)); }

    void load() { // the newest map and registry that any node has
        Item registry = map = identity = null, definition = null;
        List<String> addresses = new ArrayList<>(List.of(seeds));
        for (int i = 0; i < addresses.size(); i++) { // which grows: nodes that a map names come behind the seeds
            Node node = opened(addresses.get(i));
            if (node.marker != null && identity == null) identity = decode(node.marker, "kvemb-marker", 5, 6);
            Item tables = node.tables == null ? null : decode(node.tables, "kvemb-tables", 1, 2);
            if (tables != null && (registry == null || tables.at(2).number() > registry.at(2).number())) registry = tables;
            Item found = node.map == null ? null : decode(node.map, "kvemb-map", 2, 3);
            if (found == null) continue;
            if (map == null || found.at(2).number() > map.at(2).number()) map = found;
            for (Item place : found.at(8).list())
                if (!place.at(1).text().equals("gone") && !addresses.contains(place.at(0).text())) addresses.add(place.at(0).text());
        }
        if (map == null || identity == null) throw new Failure(LOST_NODE, "no node that answers has a marker, or a cluster map");
        for (ByteBuffer runs = little(map.at(5).bytes()); runs.remaining() >= 4; )
            Arrays.fill(owners, runs.getShort() & 0xffff, owners.length, runs.getShort() & 0xffff);
        placements.clear();
        long serial = map.at(3).number();
        place(serial, map.at(5), map.at(7));
        Item plan = map.at(10);
        if (plan.value != null && Set.of("flipped", "serving").contains(plan.at(1).text())) { // the plan has the former owners
            boolean ofNodes = plan.at(0).text().equals("nodes");
            place(serial - 1, ofNodes ? plan.at(2) : map.at(5), ofNodes ? map.at(7) : plan.at(2));
        }
        if (registry != null) for (Item one : registry.at(3).list()) if (one.get("name").text().equals(name)) definition = one;
        if (definition == null) throw new Failure(WRONG_RECORD, "there is no table %s", name);
        table = new Table(definition);
    }

    void place(long serial, Item ofNodes, Item ofShards) {
        placements.add(serial + " " + digest64("cluster map", joined(0x93, packed(serial), ofNodes.raw, ofShards.raw)));
    }

    void judge(Node node, byte[] found, long number) { // may rows of node `number` be taken from there?
        if (node.error != null) throw new Failure(LOST_NODE, "node %s: %s", node.address, node.error);
        if (found == null) throw new Failure(LOST_NODE, "node %s: its marker is gone: the server was emptied, and its rows are lost there", node.address);
        Item marker = decode(found, "kvemb-marker", 5, 6);
        if (!Arrays.equals(marker.at(2).bytes(), identity.at(2).bytes()) || marker.at(3).number() != number)
            throw new Failure(LOST_NODE, "node %s: is not node %d", node.address, number);
        if (!placements.contains(marker.at(6).number() + " " + marker.at(5).number()))
            throw new Failure(STALE_MAP, "node %s follows serial %d, this program %d", node.address, marker.at(6).number(), map.at(3).number());
        if (!Arrays.equals(marker.at(4).bytes(), identity.at(4).bytes()))
            throw new Failure(LOST_NODE, "node %s: was emptied and provisioned again", node.address);
        if (marker.list().size() > 9 && (Boolean) marker.at(9).value) throw new Failure(LOST_NODE, "node %s: its rows are being brought back", node.address);
        if (!new String(node.info).contains("run_id:" + marker.at(7).text()))
            throw new Failure(LOST_NODE, "node %s: was started again, its rows may be old", node.address);
    }

    Node nodeOf(int number) { // proven by its marker, else where the map says
        Node found = null;
        for (Node node : nodes.values()) {
            Item marker = node.marker == null || found != null ? null : decode(node.marker, "kvemb-marker", 5, 6);
            if (marker != null && marker.at(3).number() == number && Arrays.equals(marker.at(2).bytes(), identity.at(2).bytes())) found = node;
        }
        if (found == null && map.at(8).list().size() <= number) throw new Failure(LOST_NODE, "node %d: it is not at any of these addresses", number);
        if (found == null) found = opened(map.at(8).at(number).at(0).text());
        judge(found, found.marker, number);
        return found;
    }

    byte[][] pull(long[] ids) { // null: there is no such row
        Map<Integer, Node> asked = new HashMap<>();
        Node[] where = new Node[ids.length];
        byte[][] rows = new byte[ids.length][];
        for (int i = 0; i < ids.length; i++) {
            long bucket = table.bucket(ids[i]);
            where[i] = asked.computeIfAbsent(owners[table.slot(bucket)], this::nodeOf);
            where[i].ask("HGET", table.key(bucket), ByteBuffer.allocate(8).order(ByteOrder.LITTLE_ENDIAN).putLong(ids[i]).array());
        }
        Node now = null;
        Map<Node, byte[]> markers = new HashMap<>();
        try {
            for (Node node : asked.values()) {
                (now = node).ask("GET", "kvemb:marker");
                node.send();
            }
            for (int i = 0; i < ids.length; i++) rows[i] = (now = where[i]).reply(leftMs());
            for (Node node : asked.values()) markers.put(node, (now = node).reply(leftMs()));
        } catch (IOException e) {
            throw new Failure(LOST_NODE, "node %s: %s", now.address, e);
        }
        asked.forEach((number, node) -> { // the marker was read behind all rows of this connection: it vouches for them
            if (Arrays.equals(markers.get(node), node.marker)) return;
            judge(node, markers.get(node), number);
            throw new Failure(STALE_MAP, "node %s: its marker was renewed", node.address);
        });
        for (int i = 0; i < ids.length; i++) {
            int word = (int) (mix64(ids[i] ^ table.checkKey) >>> 40 << 8 | table.schema);
            if (rows[i] != null && (rows[i].length != table.sizeBytes || little(rows[i]).getInt(0) != word))
                throw new Failure(WRONG_RECORD, "node %s: the value of id %d is not this row's record", where[i].address, ids[i]);
        }
        return rows;
    }

    public static void main(String[] args) throws Exception {
        if (args.length < 2) {
            System.err.println("usage: Reader HOST:PORT,HOST:PORT TABLE [TIMEOUT_S] < lines of ids");
            System.exit(2);
        }
        Locale.setDefault(Locale.ROOT);
        Reader reader = new Reader(args[0], args[1]);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = lines.readLine()) != null; ) {
            if (line.isBlank()) continue;
            String[] texts = line.strip().split(" +");
            long[] ids = Arrays.stream(texts).mapToLong(text -> text.startsWith("-") ? Long.parseLong(text) : Long.parseUnsignedLong(text)).toArray();
            reader.deadlineMs = System.nanoTime() / 1000000 + (long) (1000 * (args.length > 2 ? Double.parseDouble(args[2]) : 5));
            byte[][] rows = null;
            for (int nLost = 0; rows == null; ) {
                try {
                    if (reader.nodes.isEmpty()) reader.load();
                    rows = reader.pull(ids);
                } catch (Failure e) {
                    boolean over = reader.leftMs() == 1 || !e.why.equals(STALE_MAP) && nLost++ > 0;
                    System.err.println(e.why + ": " + e.getMessage() + (over ? "" : "; reading the map again"));
                    reader.forget();
                    if (over) System.exit(CODES.get(e.why));
                    Thread.sleep(20);
                }
            }
            StringBuilder out = new StringBuilder();
            for (int i = 0; i < ids.length; i++) {
                if (rows[i] == null) {
                    out.append(String.format("{\"id\": %s, \"missing\": true}%n", texts[i]));
                    continue;
                }
                ByteBuffer record = little(rows[i]);
                long version = record.getLong(4);
                out.append(String.format("{\"id\": %s, \"epoch\": %d, \"k\": %d, \"row\": \"%s\"}%n", texts[i], version >>> 48, version << 16 >>> 16, reader.table.row(record)));
            }
            System.out.print(out);
            System.out.flush();
        }
    }
}
