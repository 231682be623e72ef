"""The C++ source of the fast CPU path: a string, which is packaged like any module and is part of the cache's key.

The bits of a float without its sign, read as an integer, rise with its magnitude. So every count, amax and amin are
integer comparisons; only the sum of squares converts, to float64, where no square of a float32 overflows. Data is read
in blocks that stay in the first-level cache. The extrema of a block come first: a limit outside of them needs no
counting, and a block without infinities and NaNs no masks, which saves most of the work on ordinary data.

Vector types are those of GCC and Clang; intrinsics are used only where GCC 12 splits a conversion.
"""

SOURCE = r"""
#include <cfenv>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512BW__) && defined(__AVX512DQ__)
constexpr int vector_bytes = 64;
#elif defined(__AVX2__)
constexpr int vector_bytes = 32;
#else
constexpr int vector_bytes = 16;
#endif
constexpr int wide = vector_bytes / 8;
constexpr int max_limits = 64;
constexpr double infinity = std::numeric_limits<double>::infinity();

template <class T, int n> struct Pack { typedef T type __attribute__((vector_size(n * sizeof(T)))); };
typedef Pack<double, wide>::type Doubles;
typedef Pack<float, wide>::type Floats;
typedef Pack<int64_t, wide>::type Longs;
typedef Pack<int32_t, wide>::type Ints;
typedef Pack<int16_t, wide>::type Shorts;

template <class V> inline V load(const void* p) { V v; std::memcpy(&v, p, sizeof v); return v; }

// torch.set_flush_denormal must not hide subnormals.
struct DefaultFloatEnvironment {
    std::fenv_t saved;
    DefaultFloatEnvironment() { std::fegetenv(&saved); std::fesetenv(FE_DFL_ENV); }
    ~DefaultFloatEnvironment() { std::fesetenv(&saved); }
};

inline Doubles widen(Floats x) {
#if defined(__AVX512DQ__) && defined(__AVX512BW__)
    return (Doubles)_mm512_cvtps_pd((__m256)x);
#else
    return __builtin_convertvector(x, Doubles);
#endif
}

// Each format: its word, the code of infinity, the mantissa's width, and `step` magnitudes as doubles, in any order.
// `masked` turns what is not finite into 0; without it there must be no such element.
struct Float64 {
    using Word = int64_t;
    static constexpr Word inf = 0x7ff0000000000000;
    static constexpr int mantissa = 52, step = wide;
    template <bool masked> static inline void values(const Word* p, Doubles& a, Doubles& b) {
        Longs m = load<Longs>(p) & 0x7fffffffffffffff;
        if (masked) m &= m < inf;
        a = (Doubles)m;
        b = Doubles{};
    }
};

template <bool masked> inline Doubles from_float32(Ints m) {
    m &= 0x7fffffff;
    if (masked) m &= m < 0x7f800000;
    return widen((Floats)m);
}

struct Float32 {
    using Word = int32_t;
    static constexpr Word inf = 0x7f800000;
    static constexpr int mantissa = 23, step = 2 * wide;
    template <bool masked> static inline void values(const Word* p, Doubles& a, Doubles& b) {
        a = from_float32<masked>(load<Ints>(p));
        b = from_float32<masked>(load<Ints>(p + wide));
    }
};

struct BFloat16 {
    using Word = int16_t;
    static constexpr Word inf = 0x7f80;
    static constexpr int mantissa = 7, step = 2 * wide;
    template <bool masked> static inline void values(const Word* p, Doubles& a, Doubles& b) {
        const Ints pair = load<Ints>(p);  // two elements in a word: each is the upper half of a float32
        a = from_float32<masked>(pair & -0x10000);
        b = from_float32<masked>(pair << 16);
    }
};

struct Float16 {
    using Word = int16_t;
    static constexpr Word inf = 0x7c00;
    static constexpr int mantissa = 10, step = 2 * wide;
    template <bool masked> static inline void values(const Word* p, Doubles& a, Doubles& b) {
        a = widen(convert<masked>(p));
        b = widen(convert<masked>(p + wide));
    }
    template <bool masked> static inline Floats convert(const Word* p) {
        Shorts h = load<Shorts>(p) & 0x7fff;
        if (masked) h &= h < inf;
#if defined(__AVX512DQ__) && defined(__AVX512BW__)
        return (Floats)_mm256_cvtph_ps((__m128i)h);
#elif defined(__AVX2__) && defined(__F16C__)
        return (Floats)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)&h));
#else
        // Rebias the exponent; a subnormal gets one unit more and loses the implicit bit that it never had.
        Ints m = __builtin_convertvector(h, Ints), small = m < 0x400;
        Floats normal = (Floats)((m << 13) + (112 << 23));
        Floats subnormal = (Floats)((m << 13) + (113 << 23)) - 0x1p-14f;
        return (Floats)(((Ints)subnormal & small) | ((Ints)normal & ~small));
#endif
    }
};

template <class F> double value_of(typename F::Word code) {
    typename F::Word buffer[F::step] = {code};
    Doubles a, b;
    F::template values<false>(buffer, a, b);
    double value = 0;
    for (int i = 0; i < wide; ++i) value += a[i] + b[i];
    return value;
}

template <class F> struct Statistics {
    using Word = typename F::Word;
    typedef typename Pack<Word, vector_bytes / sizeof(Word)>::type V;
    static constexpr Word top = std::numeric_limits<Word>::max();
    static constexpr int lanes = vector_bytes / sizeof(Word);
    static constexpr int block = 8192 / sizeof(Word);  // no 16-bit counter of a lane can overflow in it

    const int64_t* limits;
    const int64_t number_of_limits;
    int64_t counts[max_limits] = {};
    Word amax = 0, amin = top;  // amin is a code less one: zero, wrapped, is then the largest
    Doubles squares[2] = {};

    Statistics(const int64_t* wanted, int64_t k) : limits(wanted), number_of_limits(k) {}

    void add(const Word* p, int length) {  // length is a multiple of lanes
        V high{}, low = V{} + top, nonzero = V{} + top;
        for (int i = 0; i < length; i += lanes) {
            const V m = load<V>(p + i) & top, less = (m - 1) & top;
            high = m > high ? m : high;
            low = m < low ? m : low;
            nonzero = less < nonzero ? less : nonzero;
        }
        const Word most = largest(high), least = smallest(low);
        const Word present = smallest(nonzero);
        amin = present < amin ? present : amin;
        int active[max_limits + 3], n = 0;
        for (int j = 0; j < number_of_limits; ++j) {
            if (most < limits[j]) counts[j] += length;
            else if (least < limits[j]) active[n++] = j;
        }
        for (int j = 0; j < n; j += 4) count(p, length, active + j, n - j);
        if (most < F::inf) {
            amax = most > amax ? most : amax;
            square<false>(p, length);
        } else {
            high = V{};
            for (int i = 0; i < length; i += lanes) {
                V m = load<V>(p + i) & top;
                m &= m < F::inf;
                high = m > high ? m : high;
            }
            const Word finite = largest(high);
            amax = finite > amax ? finite : amax;
            square<true>(p, length);
        }
    }

    void count(const Word* p, int length, const int* which, int n) {  // up to four limits at once
        V limit[4], below[4] = {};
        for (int j = 0; j < 4; ++j) limit[j] = V{} + Word(limits[which[j < n ? j : 0]]);
        for (int i = 0; i < length; i += lanes) {
            const V m = load<V>(p + i) & top;
            for (int j = 0; j < 4; ++j) below[j] += m < limit[j];  // a true lane is -1
        }
        for (int j = 0; j < 4 && j < n; ++j) counts[which[j]] -= total(below[j]);
    }

    template <bool masked> void square(const Word* p, int length) {
        Doubles sum_a = squares[0], sum_b = squares[1];
        for (int i = 0; i < length; i += F::step) {
            Doubles a, b;
            F::template values<masked>(p + i, a, b);
            sum_a += a * a;
            sum_b += b * b;
        }
        squares[0] = sum_a;
        squares[1] = sum_b;
    }

    static int64_t total(const V& v) {
        int64_t sum = 0;
        for (int i = 0; i < lanes; ++i) sum += v[i];
        return sum;
    }

    static Word largest(const V& v) {
        Word most = v[0];
        for (int i = 1; i < lanes; ++i) most = v[i] > most ? v[i] : most;
        return most;
    }

    static Word smallest(const V& v) {
        Word least = v[0];
        for (int i = 1; i < lanes; ++i) least = v[i] < least ? v[i] : least;
        return least;
    }

    void add_all(const Word* p, int64_t n) {
        const int64_t whole = n - n % lanes;
        for (int64_t start = 0; start < whole; start += block) {
            add(p + start, int(whole - start < block ? whole - start : block));
        }
        if (n > whole) {
            Word padded[lanes] = {};
            std::memcpy(padded, p + whole, size_t(n - whole) * sizeof(Word));
            add(padded, lanes);
            // The padding is zeros: below every limit, and nothing to the rest.
            for (int j = 0; j < number_of_limits; ++j) counts[j] -= lanes - (n - whole);
        }
    }

    void write(double* out) const {
        for (int64_t j = 0; j < number_of_limits; ++j) out[j] = double(counts[j]);
        out += number_of_limits;
        out[0] = value_of<F>(amax);
        out[1] = amin < F::inf - 1 ? value_of<F>(amin + 1) : infinity;
        out[2] = 0;
        for (int i = 0; i < wide; ++i) out[2] += squares[0][i] + squares[1][i];
    }
};

// Bin j holds the magnitudes from 2**j times the smallest subnormal up to twice that.
template <class F> void histogram(const typename F::Word* p, int64_t n, double* bins) {
    using Word = typename F::Word;
    constexpr int fields = int(F::inf >> F::mantissa) + 1;
    constexpr int tables = 4;  // equal neighbours do not wait for each other's store
    int64_t counts[tables][fields] = {};
    int64_t subnormal[F::mantissa] = {};
    const auto count = [&](int64_t i, int table) {
        const Word m = p[i] & std::numeric_limits<Word>::max();
        ++counts[table][m >> F::mantissa];
        if (m >> F::mantissa == 0 && m) ++subnormal[63 - __builtin_clzll((unsigned long long)m)];
    };
    int64_t i = 0;
    for (; i + tables <= n; i += tables) {
        for (int table = 0; table < tables; ++table) count(i + table, table);
    }
    for (; i < n; ++i) count(i, 0);
    for (int j = 0; j < F::mantissa; ++j) bins[j] = double(subnormal[j]);
    for (int e = 1; e < fields - 1; ++e) {
        int64_t sum = 0;
        for (int table = 0; table < tables; ++table) sum += counts[table][e];
        bins[F::mantissa + e - 1] = double(sum);
    }
}

template <class F>
void measure(const void* data, int64_t n, const int64_t* limits, int64_t k, int64_t with_histogram, double* out) {
    const auto* p = static_cast<const typename F::Word*>(data);
    DefaultFloatEnvironment guard;
    Statistics<F> statistics(limits, k);
    statistics.add_all(p, n);
    statistics.write(out);
    if (with_histogram) histogram<F>(p, n, out + k + 3);
}

}  // namespace

#define EXPORT(name, F)                                                                                              \
    extern "C" void measure_##name(const void* x, int64_t n, const int64_t* l, int64_t k, int64_t h, double* out) {  \
        measure<F>(x, n, l, k, h, out);                                                                              \
    }
EXPORT(float64, Float64)
EXPORT(float32, Float32)
EXPORT(bfloat16, BFloat16)
EXPORT(float16, Float16)
"""
